"""The CUDA C++ backend: builds without spills and with the instructions it is for (wherever there is an nvcc), and on a
Hopper GPU does what the definitions say."""

from pathlib import Path

import pytest
import torch

import headrace.kernels
from headrace.errors import KernelUnsupported
from headrace.kernels.base import KernelContext, QueryRows
from headrace.kernels.cuda.build import build, compile_source, find_nvcc
from headrace.kernels.formats import FORMATS
from headrace.kernels.registry import default_registry
from headrace.kernels.testing.compare import calc_diff
from headrace.kernels.testing.problems import (
    SCALE,
    attention,
    best,
    check_attention,
    check_rows,
    indexed,
    on,
    problem,
    scores_of,
)

SOURCES = sorted(Path(next(iter(headrace.kernels.__path__))).glob("*/*.cu"))
HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
FP8 = ["tile656", "plain576"]
DEVICE = torch.device("cuda")


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_builds_without_spills(source: Path) -> None:
    cubin, said = compile_source(source)
    assert cubin[:4] == b"\x7fELF"
    assert "0 bytes spill stores" in said
    assert "Potential Performance Loss" not in said, said
    assert all(" 0 bytes stack frame, 0 bytes spill stores" in line for line in said.splitlines() if "spill" in line)


@needs_nvcc
def test_a_cubin_is_built_once(tmp_path: Path) -> None:
    source = tmp_path / "tiny.cu"
    source.write_text('extern "C" __global__ void tiny(int *x) { *x = 1; }\n')
    first = build(source, tmp_path / "cache")
    kept = list((tmp_path / "cache").iterdir())
    assert [path.read_bytes() for path in kept] == [first]
    kept[0].write_bytes(b"kept")
    assert build(source, tmp_path / "cache") == b"kept"


@needs_nvcc
def test_what_does_not_compile_is_refused_in_the_compiler_s_words(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("int wrong(")
    with pytest.raises(KernelUnsupported, match=r"wrong\.cu"):
        build(source, tmp_path)


def attend(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, QueryRows], name: str, splits: int = 0, det: bool = False
) -> torch.Tensor:
    from headrace.kernels.sparse_mla.cuda import CudaSparseMla

    q, plane, selection, rows = given
    op = CudaSparseMla(KernelContext(DEVICE, det))
    out = op(q.cuda(), plane.cuda(), selection.cuda(), on(rows, DEVICE), FORMATS[name], SCALE, splits=splits)
    return out.cpu()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer a backend allocates starts as NaN."""
    torch.manual_seed(0)
    plain = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = plain(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(torch.nan) if out.is_floating_point() and out.element_size() > 1 else out.fill_(0x7F)

    monkeypatch.setattr(torch, "empty", poisoned)


class TestSparseMla:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("name", FP8)
    @pytest.mark.parametrize("splits", [1, 2, 3])
    def test_attention(self, name: str, splits: int) -> None:
        """Full, short, single and empty selections, k no multiple of a tile; a split may be empty too."""
        given = problem(FORMATS[name], 64, 530, [700, 70], [(0, 530), (1, 64), (0, 1), (1, 0), (0, 65), (0, 529)])
        got = attend(given, name, splits)
        check_attention(got, attention(*given, FORMATS[name]))
        assert not got[3].any()

    @pytest.mark.parametrize("heads", [33, 64, 80, 128])
    def test_heads(self, heads: int) -> None:
        given = problem(FORMATS["tile656"], heads, 192, [300], [(0, 192), (0, 100)])
        check_attention(attend(given, "tile656"), attention(*given, FORMATS["tile656"]))

    def test_holes_in_a_selection_and_missing_blocks(self) -> None:
        q, plane, selection, rows = problem(FORMATS["tile656"], 64, 128, [200], [(0, 128), (0, 128)])
        selection[0, 3:9] = -1
        selection[1, 60:70] = -1
        wanted = attention(q, plane, selection, rows, FORMATS["tile656"])
        selection[0, 5] = 260  # its block has slot -1
        check_attention(attend((q, plane, selection, rows), "tile656"), wanted)

    @pytest.mark.parametrize("power", [-20, 7, 8, 12])
    def test_scales_of_any_size(self, power: int) -> None:
        """A scale beyond 2^7 does not fit the factor that unpacks codes and is applied in two steps."""
        fmt = FORMATS["tile656"]
        q, plane, selection, rows = problem(fmt, 64, 64, [64], [(0, 64)])
        plane[..., 512:528] = torch.full((4,), 2.0**power).view(torch.uint8)
        plane[..., 528:] = 0
        q[..., 512:] = 0
        given = (q * 2.0 ** (-power - 6), plane, selection, rows)
        got, wanted = attend(given, "tile656") * 2.0**-power, attention(*given, fmt) * 2.0**-power
        assert torch.isfinite(got).all()
        assert calc_diff(got, wanted) < 5e-6

    @pytest.mark.parametrize("name", FP8)
    @pytest.mark.parametrize("heads", [64, 128])
    def test_published_size(self, name: str, heads: int) -> None:
        picks = [(0, 2048), (1, 2048), (1, 100), (0, 2047), (1, 0)] * 30
        q, plane, selection, rows = given = problem(FORMATS[name], heads, 2048, [6000, 2100], picks)
        wanted = attention(q.cuda(), plane.cuda(), selection.cuda(), on(rows, DEVICE), FORMATS[name]).cpu()
        for det in (False, True):
            got = attend(given, name, det=det)
            check_attention(got, wanted)
            assert torch.equal(attend(given, name, det=det), got)

    def test_a_row_depends_on_itself_alone(self) -> None:
        q, plane, selection, rows = given = problem(FORMATS["tile656"], 64, 256, [500], [(0, 256)] * 3 + [(0, 50)])
        whole = attend(given, "tile656", det=True)
        one = QueryRows(rows.seq[3:], rows.last_row[3:], rows.block_tables)
        assert torch.equal(attend((q[3:], plane, selection[3:], one), "tile656", det=True)[0], whole[3])

    def test_a_pool_beyond_2_gib(self) -> None:
        q, plane, selection, rows = problem(FORMATS["tile656"], 64, 256, [300], [(0, 256)])
        slots, far = 120_000, 119_000
        pool = torch.full((slots, 64, 656), 0xFF, dtype=torch.uint8, device=DEVICE)
        pool[far : far + plane.shape[0]] = plane.cuda()
        moved = QueryRows(rows.seq, rows.last_row, torch.where(rows.block_tables < 0, -1, rows.block_tables + far))
        got = attend((q, pool, selection, moved), "tile656")
        check_attention(got, attention(q, plane, selection, rows, FORMATS["tile656"]))

    def test_a_query_that_is_a_slice(self) -> None:
        given = problem(FORMATS["tile656"], 64, 128, [200], [(0, 128)])
        wide = torch.randn(1, 64, 600)
        wide[..., 3:579] = given[0]
        check_attention(attend((wide[..., 3:579], *given[1:]), "tile656"), attention(*given, FORMATS["tile656"]))


class TestIndexTopk:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("heads", [20, 32])
    @pytest.mark.parametrize("name", FP8)
    @pytest.mark.parametrize("first_row", [0, 1])
    def test_selection(self, heads: int, name: str, first_row: int) -> None:
        """Few rows a sequence (the form of decode) and many; mixed in one batch, seeing nothing, little, everything."""
        from headrace.kernels.index_topk.cuda import CudaIndexTopk

        plane, tables, keys = indexed(FORMATS[name], [900, 90, 450])
        for seq, last in (
            ([1, 0, 0, 1, 0, 0, 2], [89, 899, 850, first_row - 1, 10, 17, 449]),
            ([0] * 13 + [1] * 5 + [2] * 9, [899 - 60 * i for i in range(13)] + [85, 86, 87, 88, 89] + [449] * 9),
        ):
            rows = QueryRows(torch.tensor(seq), torch.tensor(last), tables, first_row)
            q, w = torch.randn(len(seq), heads, 128), torch.randn(len(seq), heads)
            op = CudaIndexTopk(KernelContext(DEVICE, True))
            got = op(q.cuda(), w.cuda(), on(rows, DEVICE), plane.cuda(), FORMATS[name], 16).cpu()
            check_rows(got, q, w, rows, keys, 16, slack=5e-4)
            small = CudaIndexTopk(KernelContext(DEVICE, True), scratch=3 * 1024 * 5)  # passes of few rows
            again = small(q.cuda(), w.cuda(), on(rows, DEVICE), plane.cuda(), FORMATS[name], 16).cpu()
            assert torch.equal(got, again)

    @pytest.mark.parametrize("count", [5, 30])
    def test_scores(self, count: int) -> None:
        """DeepGEMM's published bound against the same quantised query; what is hidden is -inf, maxima are maxima."""
        from headrace.kernels.index_topk.cuda import CudaIndexTopk

        plane, tables, keys = indexed(FORMATS["tile656"], [1000])
        q, w, last = torch.randn(count, 32, 128), torch.randn(count, 32), 999 - torch.arange(count)
        op = CudaIndexTopk(KernelContext(DEVICE, True))
        found = []
        op.select = lambda scores, maxima, *rest: found.extend((scores.cpu(), maxima.cpu()))  # type: ignore[method-assign]
        rows = QueryRows(torch.zeros(count, dtype=torch.int64), last, tables)
        op(q.cuda(), w.cuda(), on(rows, DEVICE), plane.cuda(), FORMATS["tile656"], 64)
        scores, maxima = found
        seen = torch.arange(1000) <= last[:, None]
        wanted = torch.stack([scores_of(q[i], w[i], keys[0]) for i in range(count)])
        assert calc_diff(scores[:, :1000][seen], wanted[seen]) < 5e-6
        assert (scores[:, :1000][~seen] == -torch.inf).all()
        assert torch.equal(maxima[:, :62], scores[:, :992].view(count, 62, 16).amax(-1))

    @pytest.mark.parametrize("count", [1, 5, 6, 8, 13, 40])
    def test_scores_do_not_depend_on_the_place_of_a_row(self, count: int) -> None:
        """Rows that are equal select equally, whichever form and place computes them."""
        from headrace.kernels.index_topk.cuda import CudaIndexTopk

        plane, tables, _ = indexed(FORMATS["tile656"], [3000])
        q, w = torch.randn(1, 32, 128).expand(count, -1, -1), torch.randn(1, 32).expand(count, -1)
        rows = QueryRows(torch.zeros(count, dtype=torch.int64), torch.full((count,), 2999), tables)
        op = CudaIndexTopk(KernelContext(DEVICE, True))
        found = []
        op.select = lambda scores, *rest: found.append(scores.clone())  # type: ignore[method-assign]
        op(q.cuda(), w.cuda(), on(rows, DEVICE), plane.cuda(), FORMATS["tile656"], 64)
        one = QueryRows(rows.seq[:1], rows.last_row[:1], tables)
        op(q[:1].cuda(), w[:1].cuda(), on(one, DEVICE), plane.cuda(), FORMATS["tile656"], 64)
        assert torch.isfinite(found[0][:, :3000]).all()
        assert torch.equal(found[0][:, :3000], found[1][:, :3000].expand(count, -1))

    def test_published_size(self) -> None:
        from headrace.kernels.index_topk.cuda import CudaIndexTopk

        plane, tables, keys = indexed(FORMATS["tile656"], [20_000, 6_000])
        seq = torch.tensor([0] * 150 + [1] * 5)
        rows = QueryRows(seq, torch.cat((torch.arange(150) * 130 + 600, torch.arange(5) + 5_995)), tables)
        q, w = torch.randn(155, 32, 128), torch.randn(155, 32)
        op = CudaIndexTopk(KernelContext(DEVICE, False))
        first = op(q.cuda(), w.cuda(), on(rows, DEVICE), plane.cuda(), FORMATS["tile656"], 2048)
        check_rows(first.cpu(), q, w, rows, keys, 2048, slack=5e-4)
        again = op(q.cuda(), w.cuda(), on(rows, DEVICE), plane.cuda(), FORMATS["tile656"], 2048)
        assert torch.equal(again, first)

    def test_an_index_pool_beyond_2_gib(self) -> None:
        from headrace.kernels.index_topk.cuda import CudaIndexTopk

        plane, tables, keys = indexed(FORMATS["tile656"], [700])
        slots, far = 300_000, 299_000
        pool = torch.full((slots, 8448), 0xFF, dtype=torch.uint8, device=DEVICE)
        pool[far : far + plane.shape[0]] = plane.cuda()
        rows = QueryRows(torch.zeros(2, dtype=torch.int64), torch.tensor([699, 400]), tables)
        moved = QueryRows(rows.seq, rows.last_row, torch.where(tables < 0, -1, tables + far))
        q, w = torch.randn(2, 32, 128), torch.randn(2, 32)
        op = CudaIndexTopk(KernelContext(DEVICE, False))
        got = op(q.cuda(), w.cuda(), on(moved, DEVICE), pool, FORMATS["tile656"], 64)
        check_rows(got.cpu(), q, w, rows, keys, 64, slack=5e-4)

    @pytest.mark.parametrize("first_row", [0, 1])
    @pytest.mark.parametrize("kind", ["random", "ties", "zeros", "infinite", "clustered", "signs", "equal"])
    @pytest.mark.parametrize(("n", "k"), [(384, 20), (384, 30), (65_536, 2048), (16_384, 2048)])
    def test_select(self, kind: str, first_row: int, n: int, k: int) -> None:
        """More groups than k and fewer; candidates that fit shared memory and that do not; more groups that tie than
        can be listed; rows shorter than k, of exactly k, and empty."""
        from headrace.kernels.index_topk.cuda import CudaIndexTopk

        scores = torch.randn(7, n)
        if kind == "ties":
            scores = torch.randint(0, 3, (7, n)).float()
        elif kind == "zeros":
            scores = torch.where(torch.rand(7, n) < 0.5, -0.0, 0.0)
        elif kind == "infinite":
            scores = torch.where(torch.rand(7, n) < 0.98, -torch.inf, scores)
        elif kind == "clustered":
            scores[:, n // 9 : n // 4] += 100
        elif kind == "signs":
            scores = -scores.abs() - 1e-30
        elif kind == "equal":
            scores = torch.full((7, n), 1.5)
        last = torch.tensor([n - 1, n - 1, 3 * n // 4 + 5, k - 1 + first_row, k + first_row, 3, first_row - 1])
        hidden = torch.arange(n)
        scores = scores.masked_fill((hidden > last[:, None]) | (hidden < first_row), -torch.inf)
        maxima = scores.view(7, -1, 16).amax(-1)
        out = torch.full((7, k), 7777, dtype=torch.int32, device=DEVICE)
        op = CudaIndexTopk(KernelContext(DEVICE, True))
        op.select(scores.cuda(), maxima.cuda(), last.cuda(), first_row, k, out)
        for row, bound in enumerate(last.tolist()):
            wanted = best(scores[row], bound, first_row, k)
            assert out[row].tolist() == wanted + [-1] * (k - len(wanted)), row

    def test_it_is_what_the_registry_chooses(self) -> None:
        context = KernelContext(DEVICE, True, {"heads": 64, "index_heads": 32}, "tile656")
        assert default_registry().choose("index_topk", context).backend == "cuda"
        assert default_registry().choose("sparse_mla", context).backend == "cuda"
        small = KernelContext(DEVICE, True, {"heads": 8, "index_heads": 4}, "tile656")
        assert default_registry().choose("sparse_mla", small).backend == "triton"


def test_selections_are_cut_where_that_ends_sooner() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from headrace.kernels.sparse_mla.cuda import choose_splits

    assert choose_splits(640, 32) == 1  # 5 waves of whole rows
    assert choose_splits(4096, 32) == 1
    assert choose_splits(1, 32) == 16
    assert choose_splits(132, 32) == 1
    assert choose_splits(3, 1) == 1
    assert 1 < choose_splits(16, 32) * 16 <= 132


def test_forms_and_chunks_of_scores() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from headrace.kernels.index_topk.cuda import FEW, WIDE, chunk_blocks, form_of

    def rows(count: int, sequences: int) -> QueryRows:
        zeros = torch.zeros(count, dtype=torch.int64)
        return QueryRows(zeros, zeros, torch.zeros((sequences, 4), dtype=torch.int64))

    assert form_of(rows(640, 128)) == FEW
    assert form_of(rows(641, 128)) == WIDE
    assert max(WIDE.shared_bytes, FEW.shared_bytes) <= 227 << 10
    assert chunk_blocks(1, 10) == 16
    assert chunk_blocks(513, 2048) == 512
    assert chunk_blocks(33, 2048) == 64
