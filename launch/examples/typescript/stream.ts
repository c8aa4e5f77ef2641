// Prints what a model generates, as it is generated. The types in generated/ are made from proto/allspark.proto.
//
//   npm install && npm run build
//   node build/stream.js --address HOST:PORT|unix:/PATH --model NAME [--max-new-tokens N] [--greedy] [--ca FILE]
//        [--token TOKEN] [--proto FILE] TEXT
//
// Ctrl-C cancels the call, and with it the request.
import * as grpc from "@grpc/grpc-js";
import * as protoLoader from "@grpc/proto-loader";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import type { ProtoGrpcType } from "./generated/allspark.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    address: { type: "string", default: process.env.ALLSPARK_ADDRESS ?? "127.0.0.1:50051" },
    model: { type: "string", default: "" },
    "max-new-tokens": { type: "string", default: "64" },
    greedy: { type: "boolean", default: false },
    ca: { type: "string" },
    token: { type: "string" },
    proto: { type: "string", default: new URL("../../../../proto/allspark.proto", import.meta.url).pathname },
  },
});

// The options are those of "npm run generate".
const definition = protoLoader.loadSync(values.proto, {
  keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true,
});
const { allspark } = grpc.loadPackageDefinition(definition) as unknown as ProtoGrpcType;

const credentials = values.ca
  ? grpc.credentials.createSsl(readFileSync(values.ca))
  : grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
if (values.token) metadata.set("authorization", `Bearer ${values.token}`);
const client = new allspark.Allspark(values.address, credentials, {
  "grpc.max_receive_message_length": -1,
  "grpc.keepalive_time_ms": 10_000, // a server that stops answering is noticed within 20 s
  "grpc.keepalive_timeout_ms": 10_000,
});

const call = client.Generate(
  {
    model: values.model,
    text: positionals.join(" "),
    config: { max_new_tokens: Number(values["max-new-tokens"]), do_sample: !values.greedy },
  },
  metadata,
);
process.on("SIGINT", () => call.cancel());
try {
  for await (const answer of call) {
    for (const elements of answer.elements) process.stdout.write(elements.text);
    if (answer.error) throw new Error(answer.error.message); // it failed after it had begun
    if (answer.finish_reason) console.error(`\n${answer.finish_reason}`);
  }
} catch (error) {
  console.error((error as grpc.ServiceError).details ?? (error as Error).message);
  process.exitCode = 1;
} finally {
  client.close();
}
