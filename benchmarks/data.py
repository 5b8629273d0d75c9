"""The data pipeline beside what it stands on and beside its peers, both sides in one run on this machine.

    python benchmarks/data.py build    tokenising against the bare tokenizers, each called in a loop
    python benchmarks/data.py worker   the same for one worker alone, in processor time: for a shared machine
    python benchmarks/data.py peers    text to packed rows against datatrove, datasets and litdata
    python benchmarks/data.py load     rows from page cache: against litdata's token loader and a `datasets` table
    python benchmarks/data.py start    process start to first batch, and to resume at half, at 10^9 and 10^12 tokens

Peers that neither this Python nor one of `--pythons` has are left out, and said. Texts: ../shared/data/c4_en_1k.jsonl
(or PRETRAIN_SHARED) over and over up to `--mb`, else the standard library's own sources; tokenizers: those from there,
else some trained on them. A rate is the median of `--rounds`, sides taking turns; on a shared machine look at ratios.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.blockfile import BlockWriter
from data_prep.plan import Settings
from data_prep.shard import Manifest, ShardInfo, ShardWriter, TokenizerInfo, write_sources

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN, BATCH = 2048, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], metavar="build|worker|peers|load|start")
    parser.add_argument("--mb", type=int, default=400, help="megabytes of text (400)")
    parser.add_argument("--kinds", nargs="+", help="of the tokenizers that `build` and `worker` compare (all)")
    parser.add_argument("--pythons", nargs="+", default=[], help="interpreters of environments that have peers")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparse-tokens", type=float, default=1e12, help="size of the large dataset of `start` (1e12)")
    parser.add_argument("--work", type=Path, help="where to put a few gigabytes for the time of the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        work = Path(name)
        parts = {"build": build, "worker": worker, "peers": peers, "load": load, "start": start}
        for part in args.parts or parts:
            parts[part](work, args)


# ---- build


def build(work: Path, args: argparse.Namespace) -> None:
    corpus, tokenizers = make_corpus(work, args.mb)
    with corpus.open("rb") as file:
        size = sum(len(json.loads(line)["text"].encode()) for line in file) / 1e6
    print(f"build: {size:.0f} MB of text, {args.workers} processes, median of {args.rounds} rounds")
    for kind in args.kinds or tokenizers:
        path = tokenizers[kind]
        times: dict[str, list[float]] = {"bare": [], "tokenising": [], "command": []}
        tokens = 0.0
        for _ in range(args.rounds):
            times["bare"].append(peer([], "bare", kind, path, corpus, args.workers)["seconds"])
            seconds, tokenising, tokens = our_build(work, corpus, path, args.workers)
            times["command"].append(seconds)
            times["tokenising"].append(tokenising)
        ratio = statistics.median(b / t for b, t in zip(times["bare"], times["tokenising"], strict=True))
        whole = statistics.median(b / t for b, t in zip(times["bare"], times["command"], strict=True))
        rates = {name: size / statistics.median(values) for name, values in times.items()}
        print(
            f"  {kind:>14}: bare {rates['bare']:6.1f} MB/s | build {rates['tokenising']:6.1f} MB/s,"
            f" {tokens / 1e6 / statistics.median(times['tokenising']):.2f} M tokens/s: {ratio:.0%} of bare"
            f" (whole command with start and packing {whole:.0%})"
        )


def worker(work: Path, args: argparse.Namespace) -> None:
    """Unit by unit in turn with the bare tokenizer over the unit's texts, so that disturbances meet both sides."""
    from data_peers import bare_encode

    from data_prep import build as building
    from data_prep import fast_bpe, plan, sources
    from data_prep import worker as working
    from data_prep.tokenizer import load_tokenizer

    corpus, tokenizers = make_corpus(work, args.mb)
    print(f"worker: {args.mb} MB of JSON lines, one process; processor time, {args.rounds} rounds")
    for kind in args.kinds or tokenizers:
        out, settings = work / "worker", Settings((str(corpus),), val_fraction=0.001)
        tokenizer, bare = load_tokenizer(tokenizers[kind]), bare_encode(kind, tokenizers[kind])
        wanted, _ = plan.make_plan(settings, building._tokenizer_info(tokenizer, settings))
        fast_bpe.accelerate(tokenizer)
        documents = (
            (
                row.text
                for piece in unit
                for row in sources.read(wanted.pieces[piece])
                if isinstance(row, sources.Document)
            )
            for unit in wanted.units
        )
        units = [list(texts) for texts in documents]
        seconds = dict.fromkeys(("bare", "units", "shards"), 0.0)
        for _ in range(args.rounds):
            tokenizer.save(out / "tokenizer")
            mine = working.Worker(working.Job(out, wanted, [], [0]))
            for unit, texts in enumerate(units):
                began = time.process_time()
                for text in texts:
                    bare(text)
                middle = time.process_time()
                working.tokenise_unit(unit, tokenizer.engine, using=mine)
                seconds["bare"] += middle - began
                seconds["units"] += time.process_time() - middle
            began = time.process_time()
            for group in range(len(wanted.groups)):
                working.compose_group(group, using=mine)
            seconds["shards"] += time.process_time() - began
            shutil.rmtree(out)
        rate = args.mb * args.rounds / seconds["bare"]
        ratio = seconds["bare"] / (seconds["units"] + seconds["shards"])
        print(f"  {kind:>14}: bare {rate:.1f} MB/s; reading, encoding and writing parts takes", end=" ")
        print(f"{seconds['units'] / seconds['bare']:.2f} of its time, shards {seconds['shards'] / seconds['bare']:.2f}")
        print(f"{'':18}so a worker makes {ratio:.0%} of bare")


def peers(work: Path, args: argparse.Namespace) -> None:
    corpus, tokenizers = make_corpus(work, args.mb)
    path = tokenizers["tokenizer.json"]
    if os.path.isdir(path):
        path = _tokenizer_json(work, path)
    made = [our_build(work, corpus, path, args.workers) for _ in range(args.rounds)]
    ours = statistics.median(tokens / seconds / 1e6 for seconds, _, tokens in made)
    print(f"peers: {args.mb} MB of JSON lines to packed rows with one tokenizer.json, {args.workers} processes")
    floor = peer([], "bare", "tokenizer.json", path, corpus, args.workers)
    bare = floor["tokens"] / floor["seconds"] / 1e6
    print(f"  tiktoken alone, in a loop over texts in memory: {bare:.2f} M tokens/s")
    print(f"  ours: {ours:.2f} M tokens/s, the whole command from its start; the peers without their imports:")
    for name in ("datatrove", "datasets_map", "litdata"):
        found = peer(args.pythons, name, path, corpus, work / name, args.workers)
        shutil.rmtree(work / name, ignore_errors=True)
        if "missing" in found:
            print(f"  {name}: left out, {found['missing']}")
            continue
        rate = found["tokens"] / found["seconds"] / 1e6
        print(f"  {name}: {rate:.2f} M tokens/s; ours is {ours / rate:.1f} times as fast, tiktoken {bare / rate:.1f}")


def our_build(work: Path, corpus: Path, tokenizer: str, workers: int) -> tuple[float, float, float]:
    """Seconds of the whole command, seconds of tokenising as its last progress line says, tokens."""
    out = work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    command = ["build", corpus, "--tokenizer", tokenizer, "--out", out, "--seq-len", SEQ_LEN, "--workers", workers]
    begin = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "data_prep", *map(str, command), "--val-fraction", "0.001"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - begin
    line = [line for line in run.stderr.splitlines() if line.startswith("tokenise ")][-1]
    input_mb = corpus.stat().st_size / 1e6
    tokenising = input_mb / float(line.split("|")[1].split()[0])
    return seconds, tokenising, sum(info.tokens for infos in Manifest.read(out).splits.values() for info in infos)


def make_corpus(work: Path, megabytes: int) -> tuple[Path, dict[str, str]]:
    shared = Path(os.environ.get("PRETRAIN_SHARED", ROOT / ".." / "shared")) / "data"
    if (shared / "c4_en_1k.jsonl").is_file():
        rows = (shared / "c4_en_1k.jsonl").read_bytes().splitlines(keepends=True)
        found = {
            "tokenizer.json": shared / "tokenizers" / "gpt2",
            "tiktoken": shared / "tokenizers" / "tiktoken_small.model",
            "sentencepiece": shared / "tokenizers" / "sentencepiece_m.model",
        }
    else:
        from data_prep.tokenizer_train import train_tokenizer

        library = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in sorted(library.glob("**/*.py")) if "site-packages" not in path.parts]
        rows = [json.dumps({"text": p.read_text(errors="replace")}).encode() + b"\n" for p in paths[:1000]]
        (work / "sample.jsonl").write_bytes(b"".join(rows))
        found = {"tokenizer.json": work / "bpe", "sentencepiece": work / "sp" / "tokenizer.model"}
        for kind, folder in (("bpe", work / "bpe"), ("sentencepiece", work / "sp")):
            train_tokenizer([str(work / "sample.jsonl")], folder, kind=kind, vocab_size=8192)
    corpus = work / "corpus.jsonl"
    with corpus.open("wb") as file:
        while file.tell() < megabytes * 1e6:
            file.writelines(rows)
    return corpus, {kind: str(path) for kind, path in found.items()}


def _tokenizer_json(work: Path, folder: str) -> str:
    """The tokenizer as the one file that every peer reads."""
    from data_prep.tokenizer import load_tokenizer

    path = work / "tokenizer.json"
    path.write_text(json.dumps(load_tokenizer(folder).spec))
    return str(path)


def peer(pythons: list[str], name: str, *arguments: object) -> dict[str, Any]:
    """What a function of `data_peers` found, in the first interpreter that has the peer."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found: dict[str, Any] = {}
    for python in [sys.executable, *pythons]:
        command = [python, str(ROOT / "benchmarks" / "data_peers.py"), name, *map(str, arguments)]
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        if run.returncode:
            return {"missing": f"it failed: {run.stderr.strip().splitlines()[-1:]}"}
        found = json.loads(run.stdout.strip().splitlines()[-1])
        if "missing" not in found:
            break
    return found


# ---- load


def load(work: Path, args: argparse.Namespace) -> None:
    from data_prep.build import build as build_dataset
    from pretrain.config import DataConfig
    from pretrain.data.loader import Loader

    corpus, tokenizers = make_corpus(work, args.mb)
    data = work / "dataset"
    settings = Settings((str(corpus),))
    build_dataset(settings, tokenizers["tokenizer.json"], data, seq_len=SEQ_LEN, say=lambda _: None)
    cfg = DataConfig.model_validate({"sources": [{"path": str(data)}], "seq_len": SEQ_LEN})
    rates: dict[int, list[float]] = {1: [], 2: []}  # by epoch: in the first, every block's checksum is proved
    waits = []
    for _ in range(args.rounds):
        shape: dict[str, Any] = {"rows_per_step": BATCH, "micro_batch_size": BATCH, "dp_rank": 0, "dp_world": 1}
        with Loader(cfg, seed=1, **shape) as loader:
            loader.step(0)
            steps = sum(loader.order.sizes) // BATCH
            for epoch, found in rates.items():
                begin = time.perf_counter()
                for step in range((epoch - 1) * steps + 1, epoch * steps + 1):
                    loader.step(step * BATCH)
                found.append(steps * BATCH * SEQ_LEN / (time.perf_counter() - begin) / 1e6)
        with Loader(cfg, seed=1, **shape) as loader:
            loader.step(0)
            waited, begin = loader.data_wait_seconds, time.perf_counter()
            for step in range(1, 60):
                time.sleep(0.02)  # as a step on a GPU: the main thread waits elsewhere
                loader.step(step * BATCH)
            waits.append((loader.data_wait_seconds - waited) / (time.perf_counter() - begin))
    first, rate = (statistics.median(found) for found in rates.values())
    print(f"load: rows of {SEQ_LEN}, {BATCH} at a time, shuffled, with labels, masks and positions, from page cache")
    print(
        f"  ours: {rate:.0f} M tokens/s taken as fast as they come, {first:.0f} in the first epoch, which proves every"
    )
    print(
        f"    checksum; beside steps of 20 ms, as a trainer takes them, {statistics.median(waits):.2%} is spent waiting"
    )
    for name in ("litdata_loader", "datasets_loader"):
        found = peer(args.pythons, name, data, work / name, steps * BATCH)
        shutil.rmtree(work / name, ignore_errors=True)
        if "missing" in found:
            print(f"  {name}: left out, {found['missing']}")
            continue
        other = found["tokens"] / found["seconds"] / 1e6
        print(f"  {name}: {other:.0f} M tokens/s; ours is {rate / other:.1f} times as fast")
    shutil.rmtree(data)


# ---- start


_CHILD = """
import sys, time
import numpy as np
from pretrain.config import DataConfig
from pretrain.data.loader import Loader
folder, position = sys.argv[1], int(sys.argv[2])
imported = time.time()
cfg = DataConfig.model_validate({"sources": [{"path": folder}], "seq_len": 2048, "packing": "concat"})
with Loader(cfg, seed=1, rows_per_step=8, micro_batch_size=8, dp_rank=0, dp_world=1) as loader:
    loader.step(position)
    print(imported, time.time())
"""
_BARE = """
import sys, time
import numpy as np
from pathlib import Path
imported = time.time()
paths = sorted(Path(sys.argv[1], "shards").iterdir())
for row in np.random.default_rng(0).integers(0, 100_000, 8):
    tokens = np.memmap(paths[int(row) % len(paths)], np.uint16, "r")
    np.array(tokens[2048 + row * 2048 : 2048 + row * 2048 + 2049], np.int64)
print(imported, time.time())
"""


def start(work: Path, args: argparse.Namespace) -> None:
    for tokens in (1e9, args.sparse_tokens):
        folder = work / "sparse"
        make_sparse(folder, int(tokens))
        rows = int(tokens) // SEQ_LEN
        print(f"start: {tokens:.0e} tokens, {rows:,} rows; seconds beyond imports, median of {args.rounds}")
        for name, script, position in (
            ("first batch", _CHILD, 0),
            ("resume at half", _CHILD, rows // 2 // BATCH * BATCH),
            ("8 rows by memory mapping alone", _BARE, 0),
        ):
            beyond, whole = [], []
            for _ in range(args.rounds):
                begin = time.time()
                run = subprocess.run(
                    [sys.executable, "-c", script, str(folder), str(position)],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                imported, done = map(float, run.stdout.split())
                beyond.append(done - imported)
                whole.append(done - begin)
            print(f"  {name}: {statistics.median(beyond):.3f} s (with imports {statistics.median(whole):.1f} s)")
        shutil.rmtree(folder)


class _SparseWriter(BlockWriter):
    """Writes zeros as a hole, with the checksums that they have; the SHA-256, which only `verify` reads, is wrong."""

    def zeros(self, count: int) -> None:
        import zlib

        assert self._file is not None
        assert not self._filled
        self._file.seek(count, os.SEEK_CUR)
        self.payload_bytes += count
        self._crcs += [zlib.crc32(bytes(self._block_bytes))] * (count // self._block_bytes)
        rest = bytes(count % self._block_bytes)
        self._filled, self._crc = len(rest), zlib.crc32(rest)


def make_sparse(folder: Path, tokens: int) -> None:
    """A dataset of zeros in shards of 10^9 tokens, documents of 10^6, packed without moving a token."""
    from data_prep.pack import pack_dataset

    each, length = min(tokens, 10**9), 10**6
    count = each // length
    infos: list[ShardInfo] = []
    for number in range(tokens // each):
        path = folder / "shards" / f"train-{number:05}.tok"
        writer = ShardWriter(path, vocab_size=50257, tokenizer_hash="00" * 32, bos_id=None, eos_id=0)
        file = writer._file
        file.__class__ = _SparseWriter
        file.zeros(2 * each)  # type: ignore[attr-defined]
        lengths = np.full(count, length)
        writer.tokens = 0
        writer._ends.frombytes((np.cumsum(lengths).astype(np.uint64)).tobytes())
        for column, value in ((writer._sources, 0), (writer._lines, 1), (writer._sizes, 4 * length)):
            column.extend([value] * count)
        writer.tokens, writer.documents, writer.num_bytes = each, count, 4 * each
        infos.append(writer.finish())
    write_sources(folder, [])
    info = TokenizerInfo("huggingface", "00" * 32, 50257, None, 0, None)
    Manifest(tokenizer=info, splits={"train": tuple(infos)}).write(folder)
    pack_dataset(folder, SEQ_LEN, "concat")


if __name__ == "__main__":
    main()
