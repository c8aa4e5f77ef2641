// Prints what a model generates, as it is generated. The package allspark is made from proto/allspark.proto.
//
//	go generate && go mod tidy && go build
//	./allspark-stream -address HOST:PORT|unix:/PATH -model NAME [-max-new-tokens N] [-greedy] [-ca FILE] [-token TOKEN] TEXT
//
// Ctrl-C cancels the call, and with it the request.
package main

//go:generate mkdir -p allspark
//go:generate protoc -I../../../proto --go_out=allspark --go_opt=paths=source_relative --go_opt=Mallspark.proto=allspark-stream/allspark --go-grpc_out=allspark --go-grpc_opt=paths=source_relative --go-grpc_opt=Mallspark.proto=allspark-stream/allspark allspark.proto

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "allspark-stream/allspark"
)

func main() {
	address := flag.String("address", os.Getenv("ALLSPARK_ADDRESS"), "the group's address")
	model := flag.String("model", "", "the model's name")
	maxNewTokens := flag.Int("max-new-tokens", 64, "the most tokens of the answer")
	greedy := flag.Bool("greedy", false, "always take the likeliest token")
	ca := flag.String("ca", "", "a file with the authorities that may have signed the server's certificate")
	token := flag.String("token", "", "the bearer token to show")
	flag.Parse()

	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if *token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+*token)
	}
	request := &pb.GenerateRequest{
		Model:  *model,
		Prompt: &pb.GenerateRequest_Text{Text: strings.Join(flag.Args(), " ")},
		Config: &pb.GenerateConfig{
			MaxNewTokens: proto.Int32(int32(*maxNewTokens)),
			DoSample:     proto.Bool(!*greedy),
		},
	}
	if err := stream(ctx, *address, *ca, request); err != nil {
		fmt.Fprintln(os.Stderr, message(err))
		os.Exit(1)
	}
}

// stream sends one request and prints its text. Cancelling ctx cancels the request.
func stream(ctx context.Context, address, ca string, request *pb.GenerateRequest) error {
	options := []grpc.DialOption{
		// A server that stops answering is noticed within 20 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1 << 30)),
	}
	if ca == "" {
		options = append(options, grpc.WithInsecure())
		if strings.HasPrefix(address, "unix:") {
			options = append(options, grpc.WithAuthority("localhost"))
		}
	} else {
		files, err := credentials.NewClientTLSFromFile(ca, "")
		if err != nil {
			return err
		}
		options = append(options, grpc.WithTransportCredentials(files))
	}
	connection, err := grpc.Dial(address, options...)
	if err != nil {
		return err
	}
	defer connection.Close()
	call, err := pb.NewAllsparkClient(connection).Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		answer, err := call.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, elements := range answer.Elements {
			fmt.Print(elements.Text)
		}
		if answer.Error != nil { // it failed after it had begun
			return errors.New(answer.Error.Message)
		}
		if answer.FinishReason != "" {
			fmt.Fprintln(os.Stderr, "\n"+answer.FinishReason)
		}
	}
}

// message is an error's text without gRPC's prefix.
func message(err error) string {
	if found, ok := status.FromError(err); ok {
		return found.Message()
	}
	return err.Error()
}
