"""Requests in the calling process that are started, paused, resumed and stopped."""

import asyncio

from funitel.llm import AsyncLLM, RequestOutputKind, SamplingParams


async def main() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    async with AsyncLLM("smollm2-135m-instruct", max_batch_total_tokens=4096) as llm:
        text = ""
        async for output in llm.generate("1, 2, 3, 4,", greedy, request_id="count"):
            text += "".join(part.text for part in output.outputs)
        print(text)
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        request = llm.start_request("The capital of France is", long)
        request.pause()
        await request.sync_async()
        print(request.state.value)
        request.resume()
        await request.get_async()
        request.stop()
        await request.sync_async()
        print(request.state.value, request.output.outputs[0].finish_reason)


asyncio.run(main())

# prints:
#  5, 6, 7
# paused
# stopped abort
