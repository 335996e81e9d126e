"""Processes can be started while gRPC works."""

import subprocess
import sys

# As the router does it: on uvloop, which forks, with calls in flight. The handlers of gRPC crashed one child in fifty.
STARTS = """
import asyncio, os
import funitel.proto  # before gRPC, which reads its settings as it is imported
import grpc, uvloop

async def echo(request, context):
    return request

async def call(port):
    while True:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(20):
                await channel.unary_unary("/echo.Echo/Echo")(b"")

async def main():
    server = grpc.aio.server()
    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calls = [asyncio.create_task(call(port)) for _ in range(4)]
    codes = set()
    for _ in range(200):
        child = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.PIPE)
        codes.add(await child.wait())
    print(codes, flush=True)
    os._exit(0)

uvloop.run(main())
"""


def test_no_process_crashes_that_is_started_while_calls_are_in_flight() -> None:
    done = subprocess.run((sys.executable, "-c", STARTS), capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("{0}\n", "")
