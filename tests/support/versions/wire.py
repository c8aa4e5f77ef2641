"""Records the bytes between a client and a server, and plays either side again. It does not know the messages."""
import base64
import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

SESSION = "/allspark.Allspark/Session"


def _same(data):
    return data


class _Handler(grpc.GenericRpcHandler):
    """unary(method, data) answers a call; session(messages) yields the answers to a session's messages."""

    def __init__(self, unary, session):
        self._unary, self._session = unary, session

    def service(self, details):
        method = details.method
        if method == SESSION:
            return grpc.stream_stream_rpc_method_handler(lambda messages, context: self._session(messages))
        return grpc.unary_unary_rpc_method_handler(lambda data, context: self._answer(method, data, context))

    def _answer(self, method, data, context):
        try:
            return self._unary(method, data)
        except grpc.RpcError as error:
            context.set_trailing_metadata(tuple((e.key, e.value) for e in error.trailing_metadata() or ()))
            context.abort(error.code(), error.details())


@contextlib.contextmanager
def _serving(address, handler):
    server = grpc.server(ThreadPoolExecutor(16), handlers=[handler])
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def recording(address, server, breaks):
    """Serves at `address` what `server` answers, and yields a record of it.

    The record has {"sessions": [[[side, data], …], …], "calls": [[method, data, answer], …]}; side is "client" or
    "server", data is base64. breaks(sessions): called after each answer of a session; if it returns true, the
    connection of that session breaks.
    """
    record = {"sessions": [], "calls": []}
    channel = grpc.insecure_channel(server)

    def unary(method, data):
        answer = channel.unary_unary(method, _same, _same)(data)
        record["calls"].append([method, base64.b64encode(data).decode(), base64.b64encode(answer).decode()])
        return answer

    def session(messages):
        frames = []
        record["sessions"].append(frames)

        def forwarded():
            for message in messages:
                frames.append(["client", base64.b64encode(message).decode()])
                yield message

        call = channel.stream_stream(SESSION, _same, _same)(forwarded())
        for answer in call:
            frames.append(["server", base64.b64encode(answer).decode()])
            yield answer
            if breaks(record["sessions"]):
                call.cancel()
                return

    with _serving(address, _Handler(unary, session)):
        yield record
    channel.close()


@contextlib.contextmanager
def playing_server(address, record):
    """Serves at `address` the recorded answers. A session's answers wait for as many messages of the client as were
    recorded before them.
    """
    sessions = iter(record["sessions"])
    answers = {method: base64.b64decode(answer) for method, _, answer in reversed(record["calls"])}

    def session(messages):
        for side, data in next(sessions):
            if side == "server":
                yield base64.b64decode(data)
            elif next(messages, None) is None:
                return

    with _serving(address, _Handler(lambda method, data: answers[method], session)):
        yield


def play_client(server, frames, is_settled):
    """Sends the client's side of a recorded session to a server; returns the server's answers.

    is_settled(answers, message): whether the server has answered all that must precede this message of the client; the
    last message is None.
    """
    outbox, answers, changed = queue.SimpleQueue(), [], threading.Condition()
    with grpc.insecure_channel(server) as channel:
        call = channel.stream_stream(SESSION, _same, _same)(iter(outbox.get, None))

        def read():
            with contextlib.suppress(grpc.RpcError):
                for answer in call:
                    with changed:
                        answers.append(answer)
                        changed.notify()

        reader = threading.Thread(target=read)
        reader.start()
        for message in [*(base64.b64decode(data) for side, data in frames if side == "client"), None]:
            with changed:
                assert changed.wait_for(lambda m=message: is_settled(answers, m), 20), "the server does not answer"
            outbox.put(message)
        reader.join(10)
    return answers
