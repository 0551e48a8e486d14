"""Compiler for helpers: to LLVM IR only, which is optimized once, as part of each kernel.

Numba alone optimizes each function and emits its machine code, and does so again in every caller. That takes a fourth
longer, and helpers whose loops are vectorized alone add floats in another order, so decode steps would round
differently. Uses numba's hooks for custom compilers:
https://numba.readthedocs.io/en/stable/developer/custom_pipeline.html
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _UnoptimizedLibrary(JITCodeLibrary):
    """Functions that are linked into other libraries and never run on their own."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerToLibrary(NativeLowering):
    _name = "lower_to_library"

    def run_pass(self, state: Any) -> bool:
        state.flags.no_compile = True
        state.library = _UnoptimizedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        lowered = state["cr"]
        # Numba finds the function by its entry point, a different builtin for each function. A call from Python runs
        # the builtin: this one raises ValueError.
        entry_point = list[Any]().remove
        state.targetctx.insert_user_function(entry_point, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=entry_point)
        return True


class HelperCompiler(CompilerBase):
    """Numba's compiler for functions that only kernels call."""

    def define_pipelines(self) -> list[Any]:
        """Return the passes of numba's nopython mode with :class:`_LowerToLibrary` as the lowering."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state, "helper")
        passes.passes = [
            (_LowerToLibrary, text) if step is NativeLowering else (step, text) for step, text in passes.passes
        ]
        passes.finalize()
        return [passes]
