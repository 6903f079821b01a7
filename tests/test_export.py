"""The exported matcher in onnxruntime, for any number of pairs and keypoints."""

from __future__ import annotations

import pytest
import torch

import vispe


@pytest.mark.slow
@torch.inference_mode()
def test_onnx_file_gives_the_same_matches_for_any_count(tmp_path, features):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the exported file")
    pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
    from vispe.export import export_onnx

    path = tmp_path / "lightglue.onnx"
    export_onnx("lightglue_aliked", path)
    session = runtime.InferenceSession(str(path))
    network = vispe.load("lightglue_aliked")
    whole = features("chelsea", 512)
    for b, m, n in ((1, 512, 400), (2, 100, 300), (1, 0, 50), (1, 50, 0), (1, 1, 20), (1, 2, 2), (3, 0, 0)):
        pair = [
            p._replace(
                keypoints=p.keypoints[:, :k].expand(b, -1, -1), descriptors=p.descriptors[:, :k].expand(b, -1, -1)
            )
            for p, k in zip(whole, (m, n), strict=True)
        ]
        feed = {}
        for k, p in enumerate(pair):
            feed |= {f"keypoints{k}": p.keypoints.numpy(), f"descriptors{k}": p.descriptors.numpy()}
            feed |= {f"size{k}": torch.tensor(p.size, dtype=torch.float32).expand(b, 2).numpy()}
        matches0, matches1, scores0, _ = (torch.from_numpy(array) for array in session.run(None, feed))
        wanted = network.match(*pair)
        assert torch.equal(matches0, wanted.matches0)
        assert torch.equal(matches1, wanted.matches1)
        torch.testing.assert_close(scores0, wanted.scores0, atol=2e-4, rtol=0)


def test_only_matchers_are_exported(tmp_path):
    from vispe.export import export_onnx

    with pytest.raises(ValueError, match="lightglue_aliked"):
        export_onnx("aliked_n16", tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())
