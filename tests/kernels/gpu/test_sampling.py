"""Drawing without a sort gives the tokens that sorting would allow, as often as it would."""

import torch


def allowed(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    ordered, ids = probs.double().sort(descending=True)
    ordered = ordered[:top_k] / ordered[:top_k].sum()
    kept = (ordered.cumsum(0) - ordered < top_p) & (ordered >= min_p * ordered[0])
    return set(ids[:top_k][kept].tolist())


def test_what_is_drawn_and_how_often(device: torch.device) -> None:
    from serve_app.kernels.gpu.sampling import draw_truncated

    vocab, count = 300, 3
    generator = torch.Generator().manual_seed(0)
    for top_k, top_p, min_p, spread in [(vocab, 0.9, 0.0, 0.5), (100, 0.8, 0.02, 2.0)]:
        probs = torch.softmax(torch.randn(vocab, generator=generator) * spread, -1)
        points = (torch.arange(count).double() + 0.5) / count
        chosen = torch.full((count + 1,), -7, device=device)
        done = torch.tensor([False] * count + [True], device=device)

        def column(value, dtype=torch.float32):
            return torch.full((count + 1, 1), value, dtype=dtype, device=device)

        draw_truncated(
            probs.expand(count + 1, vocab).to(device), done, chosen, column(top_k, torch.int64), column(top_p),
            column(min_p), torch.cat([points, points[:1]]).unsqueeze(1).to(device),
        )  # fmt: skip
        expected = allowed(probs, top_k, top_p, min_p)
        kept = torch.zeros(vocab, dtype=torch.float64)
        kept[list(expected)] = probs[list(expected)].double()
        wanted = torch.searchsorted(kept.cumsum(0), points * kept.sum(), right=True)
        assert chosen.tolist()[-1] == -7
        assert chosen.tolist()[:-1] == wanted.tolist()
        assert set(chosen.tolist()[:-1]) <= expected and len(expected) < vocab
