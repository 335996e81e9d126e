"""An HTTP server around OpenVINO GenAI's continuous batching, which comes without one: /health and /v1/completions.

Runs in the environment of `openvino-genai`, so it imports nothing of this project. One thread computes the steps; a
thread for each connection writes its tokens as events.

    python openvino_host.py MODEL.gguf --port 8000 --threads 2 --streams 16
"""

import argparse
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found]

CACHE_GB = 2


class Engine:
    """The pipeline and its compute thread."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
        scheduler.max_num_seqs = arguments.streams
        scheduler.max_num_batched_tokens = arguments.batched_tokens
        properties = {"INFERENCE_NUM_THREADS": arguments.threads}
        if arguments.kv_type:
            properties["KV_CACHE_PRECISION"] = arguments.kv_type
        self._pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._work = threading.Condition()
        self._incoming: list[tuple[Any, Any, queue.Queue[int | None]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, prompt: str, num_tokens: int) -> tuple[int, Iterator[str]]:
        """The number of tokens of a prompt, and the texts of `num_tokens` greedy tokens as they come."""
        token_ids = self._tokenizer.encode(prompt, add_special_tokens=False).input_ids
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        tokens: queue.Queue[int | None] = queue.Queue()
        with self._work:
            self._incoming.append((token_ids, config, tokens))
            self._work.notify()
        return token_ids.shape[1], self._texts(tokens)

    def _texts(self, tokens: "queue.Queue[int | None]") -> Iterator[str]:
        while (token := tokens.get()) is not None:
            yield self._tokenizer.decode([token])

    def _run(self) -> None:
        running: list[tuple[Any, queue.Queue[int | None]]] = []
        number = 0
        while True:
            with self._work:
                self._work.wait_for(lambda: self._incoming or running)
                incoming, self._incoming = self._incoming, []
            for token_ids, config, tokens in incoming:
                running.append((self._pipeline.add_request(number, token_ids, config), tokens))
                number += 1
            self._pipeline.step()
            for handle, tokens in list(running):
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            tokens.put(token)
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    tokens.put(None)
                    running.remove((handle, tokens))


def serve(arguments: argparse.Namespace) -> None:
    """Answer requests until the process is ended."""
    engine = Engine(arguments)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._whole({"data": [{"id": "openvino"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self.send_error(404)
                return
            num_prompt, texts = engine.generate(body["prompt"], body["max_tokens"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            num_tokens = 0
            for text in texts:
                num_tokens += 1
                self._event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            self._event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, content: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

        def _whole(self, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *values: Any) -> None:
            """No line for each request."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    Server(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--batched-tokens", type=int, default=512)
    parser.add_argument("--kv-type", default="", help="u8, f16, bf16 or f32; OpenVINO's choice if empty")
    serve(parser.parse_args())
