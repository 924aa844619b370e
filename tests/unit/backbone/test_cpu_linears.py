"""Products of float32 by oneDNN: the same numbers up to rounding, only inside, and only where they are meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Lab, save_model
from torch import nn

from raycl.backbone import BackboneConfig, BackboneOptions, load_backbone, load_codec
from raycl.backbone import linears as cpu_linears
from raycl.backbone.linears import by_onednn

HAS_PRODUCT = hasattr(torch.ops.mkldnn, "_linear_pointwise")
CPU = torch.device("cpu")


@pytest.mark.skipif(not HAS_PRODUCT, reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", [(3, 24), (2, 5, 24), (0, 24), (1, 1, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_linear(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(*shape).requires_grad_()
    plain, calls = linear(x), []
    product = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: calls.append(1) or product(*a))
    with by_onednn(nn.Sequential(linear)):
        assert linear(x).requires_grad and not calls, "where something is differentiated, it is the linear's own"
        with torch.no_grad():
            result = linear(x)
            spread = linear(x.detach().expand(2, *shape)[..., ::1].transpose(0, -2).transpose(0, -2))
            half = linear.to(torch.bfloat16)(x.to(torch.bfloat16))
            linear.float()
    assert len(calls) == 2 and half.dtype == torch.bfloat16
    torch.testing.assert_close(result, plain)
    torch.testing.assert_close(spread, plain.expand(2, *plain.shape))
    assert "forward" not in vars(linear)


def test_only_inference_in_float32_has_them(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycl.backbone.load.prefers_onednn", lambda: True)
    for dtype, expected in (("float32", True), ("bfloat16", False)):
        config = BackboneConfig(name=str(lab.model_folder("llama")), dtype=dtype)
        backbone = load_backbone(config, load_codec(config, 24, 8), CPU, 0, BackboneOptions(trains=True))
        layer = backbone.model.get_output_embeddings()
        with pytest.raises(RuntimeError, match="an error"), backbone.inference():
            assert ("forward" in vars(layer)) == expected
            raise RuntimeError("an error")
        assert "forward" not in vars(layer)


@pytest.mark.parametrize(
    ("capability", "vendor", "expected"),
    [("AVX512", "AuthenticAMD", HAS_PRODUCT), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_which_cpus_have_them(
    capability: str, vendor: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cpu_linears.prefers_onednn.__wrapped__(info) == expected
    assert not cpu_linears.prefers_onednn.__wrapped__(tmp_path / "none")


def test_saved_models_need_nothing_of_it(tmp_path: Path) -> None:
    """A copy of a model, and its names, are the same inside."""
    config = BackboneConfig(name=str(save_model("llama", tmp_path)))
    model = load_backbone(config, load_codec(config, 24, 8), CPU, 0).model
    names = list(model.state_dict())
    with by_onednn(model):
        assert list(model.state_dict()) == names
