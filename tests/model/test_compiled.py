"""What is compiled stays compiled, or says that it cannot."""

from __future__ import annotations

import pytest
import torch
from support.launch import CAN_COMPILE

from trainer.model import compiled
from trainer.model.attention import compiled_flex


@pytest.mark.skipif(not CAN_COMPILE, reason="needs a compiler")
def test_out_of_graphs_is_an_error(monkeypatch):
    """By itself torch goes on uncompiled, which FlexAttention does not survive under selective recompute."""
    monkeypatch.setattr(compiled, "GRAPHS", 2)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False):
        double = compiled.compiled(lambda x: 2 * x)
        for size in (2, 3):
            assert torch.equal(double(torch.ones(size)), torch.full((size,), 2.0))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            double(torch.ones(4))


def test_attention_has_graphs_for_many_shapes():
    """Also where nothing else is compiled: kinds of layers, micro-batches and evaluation each need one."""
    compiled_flex.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        compiled_flex()
        assert torch._dynamo.config.recompile_limit == compiled.GRAPHS
        assert torch._dynamo.config.fail_on_recompile_limit_hit
