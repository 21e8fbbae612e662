# What is thrown where PyTorch notes a place for its memory history reaches the program, which gets no memory.
#: attach plain native
#: torch 2.11
import ctypes

import torch
from case import MIB, compiled

SOURCE = """
#include <stdexcept>
#include <torch/csrc/cuda/memory_snapshot.h>
#include <torch/csrc/profiler/combined_traceback.h>
using torch::CapturedTraceback;
struct Throwing : CapturedTraceback::Python {
    bool throws = false;
    bool canGather() { return true; } // 2.11 has it
    std::vector<CapturedTraceback::PyFrame> gather() override {
        if (throws) throw std::runtime_error("no place to be found");
        return {};
    }
    void release(std::vector<CapturedTraceback::PyFrame> &) override {}
    void appendSymbolized(
        const std::vector<CapturedTraceback::PyFrame> &, torch::SymbolizedTracebacks &) override {}
    int traverse(
        std::vector<CapturedTraceback::PyFrame> &, CapturedTraceback::visitproc, void *) override {
        return 0;
    }
    int clear(std::vector<CapturedTraceback::PyFrame> &) override { return 0; }
};
static Throwing throwing;
extern "C" {
void record(bool on) {
    const std::optional<std::string> all = "all";
    torch::cuda::_record_memory_history(
        on ? all : std::nullopt, all, "python", size_t(10), true, false, false, {});
}
void add_throwing() { CapturedTraceback::addPythonUnwinder(&throwing); }
void throws(bool on) { throwing.throws = on; }
}
"""
caller = compiled(SOURCE)
for function in caller.record, caller.throws:
    function.argtypes = [ctypes.c_bool]


def made(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


kept = made(2)
live = torch.cuda.memory_allocated()
caller.add_throwing()
caller.record(True)
for act in lambda: made(4), lambda: made(1 << 20), torch.cuda.empty_cache:
    caller.throws(True)
    try:
        act()
    except RuntimeError as error:
        assert "no place to be found" in str(error), error
    else:
        raise AssertionError("nothing was thrown")
    caller.throws(False)
    assert torch.cuda.memory_allocated() == live
more = made(4)
assert torch.cuda.memory_allocated() == live + 4 * MIB
caller.record(False)
