"""Importing torch without what only tracing and training use, each in a process that has not imported torch."""

import json
import subprocess
import sys

PRELUDE = "import json, sys; from funitel.model_server.device import torch_import; "
META = "torch._C._dispatch_get_registrations_for_dispatch_key('Meta')"


def run(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_of_what_is_deferred_is_executed_by_the_imports_of_a_shard() -> None:
    code = (
        "torch_import.import_torch(); import funitel.model_server.rpc.serve; "
        "print(json.dumps([name for name in torch_import.DEFERRED "
        "if type(sys.modules.get(name)).__name__ != 'DeferredModule']))"
    )
    assert run(code) == []


def test_the_first_attribute_executes_a_module() -> None:
    code = (
        "torch_import.import_torch(); import torch; before = type(torch.optim).__name__; "
        "found = torch.optim.SGD.__name__; from torch.distributions import Normal; "
        "print(json.dumps([before, found, type(torch.optim).__name__, Normal(0.0, 1.0).has_rsample, "
        "hasattr(torch.optim, 'Nothing')]))"
    )
    assert run(code) == ["DeferredModule", "SGD", "module", True, False]


def test_the_shapes_of_results_are_registered_where_they_are_asked_for() -> None:
    code = "torch_import.import_torch(); import torch; few = len({META}); torch_import.register_shapes(); "
    code += "print(json.dumps([few, sorted({META})]))"
    few, registered = run(code.replace("{META}", META))  # type: ignore[misc]
    plain = run(f"import torch; print(json.dumps(sorted({META})))")
    assert registered == plain
    assert few < len(registered)


def test_a_generator_needs_nothing_that_was_deferred() -> None:
    draws = "print(json.dumps(torch.rand(3, generator={}).tolist()))"
    ours = run("torch_import.import_torch(); import torch; " + draws.format("torch_import.seeded_generator(7)"))
    assert ours == run("import torch; " + draws.format("torch.Generator().manual_seed(7)"))


def test_another_thread_waits_until_a_module_is_executed() -> None:
    code = (
        "import threading; torch_import.import_torch(); import torch; found = []; "
        "ask = lambda: found.append(torch.optim.lr_scheduler.StepLR.__name__); "
        "threads = [threading.Thread(target=ask) for _ in range(4)]; [t.start() for t in threads]; "
        "[t.join() for t in threads]; print(json.dumps(found))"
    )
    assert run(code) == ["StepLR"] * 4
