"""What libraries of others are told: torchvision's two operators are declared where its compiled library does not load,
and training keeps the memory that it frees; afterwards that goes back to the system again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from hwnas.system import libraries


def test_torchvision_and_timm_are_imported_in_a_fresh_process_after_hwnas() -> None:
    code = ("import hwnas, sys; assert 'torch' not in sys.modules\n"
            "import torchvision, timm, torch; torch.ops.torchvision.nms")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_operators_are_declared_only_where_the_library_does_not_load(monkeypatch):
    import torch

    monkeypatch.setattr(libraries, "_loads_compiled", lambda: False)
    libraries.declare_missing.cache_clear()
    libraries.declare_missing()
    for name in ("nms", "qnms"):
        assert hasattr(torch.ops.torchvision, name)
    monkeypatch.setattr(libraries, "_loads_compiled", lambda: True)
    monkeypatch.setattr(libraries, "_SCHEMAS", {"never": "not a schema"})
    libraries.declare_missing.cache_clear()
    kept = len(libraries._kept)
    libraries.declare_missing()  # the schema would be refused
    monkeypatch.undo()
    libraries.declare_missing.cache_clear()
    assert len(libraries._kept) == kept


# In a process of its own: the allocator's options are the process's.
CHILD = """
import json, resource
import torch
from hwnas.system.libraries import release_memory
from hwnas.training.loop import seeded

MEGABYTES = 48

def faults():
    "Page faults of twelve large blocks, each freed before the next, once the heap has grown to what they need."
    for _ in range(12):
        torch.ones(MEGABYTES << 18)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(12):
        torch.ones(MEGABYTES << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def returned():
    "Megabytes that go back to the system when four blocks are freed."
    blocks = [torch.ones(MEGABYTES << 18) for _ in range(4)]
    held = resident()
    del blocks
    return held - resident()

found = {"faults": faults(), "returned": returned()}
with seeded(0, 1):
    found["faults inside"] = faults()
    found["returned inside"] = returned()
    before = resident()
    release_memory()
    found["released"] = before - resident()
    returned()
    before = resident()
found["given back"] = before - resident()
print(json.dumps(found))
"""


def told(settings: dict[str, str]) -> dict[str, int]:
    """What the child saw, with these settings of the allocator and no others."""
    environment = {key: value for key, value in os.environ.items()
                   if not key.startswith("MALLOC_") and key != "GLIBC_TUNABLES"}
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, check=True,
                         env={**environment, **settings})
    return dict(json.loads(run.stdout))


@pytest.mark.soak
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is told")
def test_what_training_frees_is_kept_until_it_ends_unless_the_user_sets_the_allocator():
    found = told({})
    assert found["faults inside"] < found["faults"] / 4
    assert found["returned inside"] < 10
    assert min(found["returned"], found["released"], found["given back"]) > 120
    assert told({"MALLOC_MMAP_THRESHOLD_": "65536"})["returned inside"] > 120
