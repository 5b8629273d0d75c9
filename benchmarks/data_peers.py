"""What `data.py` compares with, each run in a process of its own: `python benchmarks/data_peers.py NAME ...`.

Every function prints one JSON object on its last line. A peer that is not installed says so and is left out.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def bare(kind: str, tokenizer: str, corpus: str, workers: int) -> dict[str, float]:
    """The tokenizer's own library called in a loop over texts in memory, in `workers` processes at once."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(workers + 1)
    results = context.Queue()
    processes = [
        context.Process(target=_bare_loop, args=(kind, tokenizer, corpus, rank, workers, ready, results))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    ready.wait()
    counts = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return {"seconds": max(seconds for _, seconds in counts), "tokens": sum(tokens for tokens, _ in counts)}


def _bare_loop(kind: str, tokenizer: str, corpus: str, rank: int, workers: int, ready: Any, results: Any) -> None:
    encode = bare_encode(kind, tokenizer)
    with open(corpus, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for number, line in enumerate(file) if number % workers == rank]
    ready.wait()
    start = time.perf_counter()
    tokens = sum(len(encode(text)) for text in texts)
    results.put((tokens, time.perf_counter() - start))


def bare_encode(kind: str, path: str) -> Callable[[str], Any]:
    from data_prep.fast_bpe import encoding_of
    from data_prep.tokenizer import LLAMA3_PATTERN, load_tokenizer

    if kind == "sentencepiece":
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_file=path).encode
    if kind == "tiktoken":
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        ranks = load_tiktoken_bpe(path)
        special = {"<|end_of_text|>": len(ranks)}
        return tiktoken.Encoding(
            "bare", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        ).encode_ordinary
    spec = load_tokenizer(path).spec
    assert spec is not None
    if kind == "tokenizers":
        import tokenizers

        library = tokenizers.Tokenizer.from_file(path)
        return lambda text: library.encode(text, add_special_tokens=False).ids
    return encoding_of(spec)[0].encode_ordinary


def datatrove(tokenizer: str, corpus: str, out: str, workers: int) -> dict[str, float]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    parts = _in_parts(corpus, out, workers)
    steps = [
        JsonlReader(str(parts), glob_pattern="*.jsonl"),
        DocumentTokenizer(f"{out}/tokens", tokenizer_name_or_path=tokenizer, shuffle_documents=False, batch_size=1000),
    ]
    start = time.perf_counter()
    LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=f"{out}/logs").run()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(path.stat().st_size // 2 for path in Path(out).rglob("*.ds"))}


def datasets_map(tokenizer: str, corpus: str, out: str, workers: int) -> dict[str, float]:
    """datasets.map with the fast tokenizer, then grouped into rows, as `run_clm` does."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=tokenizer)
    length = 2049

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], add_special_tokens=False)["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        ids = [token for row in batch["input_ids"] for token in row]
        whole = len(ids) // length * length
        return {"input_ids": [ids[at : at + length] for at in range(0, whole, length)]}

    start = time.perf_counter()
    raw = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=f"{out}/cache")
    rows = raw.map(encode, batched=True, num_proc=workers, remove_columns=raw.column_names)
    rows = rows.map(group, batched=True, num_proc=workers)
    rows.save_to_disk(f"{out}/rows")
    return {"seconds": time.perf_counter() - start, "tokens": len(rows) * length}


def litdata(tokenizer: str, corpus: str, out: str, workers: int) -> dict[str, float]:
    from litdata import TokensLoader, optimize

    parts = _in_parts(corpus, out, workers)
    start = time.perf_counter()
    optimize(
        fn=_LitEncode(tokenizer),
        inputs=[str(path) for path in sorted(parts.iterdir())],
        output_dir=f"{out}/optimized",
        chunk_size=2049 * 4096,
        item_loader=TokensLoader(),
        num_workers=workers,
    )
    index = json.loads(Path(f"{out}/optimized/index.json").read_text())
    return {"seconds": time.perf_counter() - start, "tokens": sum(chunk["dim"] for chunk in index["chunks"])}


class _LitEncode:
    def __init__(self, path: str):
        self.path = path

    def __call__(self, corpus: str) -> Iterator[Any]:
        import tokenizers
        import torch

        library = tokenizers.Tokenizer.from_file(self.path)
        with open(corpus, encoding="utf-8") as file:
            for line in file:
                yield torch.tensor(library.encode(json.loads(line)["text"]).ids, dtype=torch.int32)


def litdata_loader(dataset: str, out: str, rows: int) -> dict[str, float]:
    """Batches of 8 rows of 2,049 tokens by litdata's token loader, shuffled, in the main process."""
    import torch
    from litdata import StreamingDataset, TokensLoader, optimize

    optimize(
        fn=_LitDocuments(dataset),
        inputs=[0],
        output_dir=f"{out}/tokens",
        chunk_size=2049 * 4096,
        item_loader=TokensLoader(),
        num_workers=1,
    )
    stream = StreamingDataset(f"{out}/tokens", item_loader=TokensLoader(block_size=2049), shuffle=True)
    return _time_rows(lambda: iter(stream), rows, torch.stack)


class _LitDocuments:
    def __init__(self, folder: str):
        self.folder = folder

    def __call__(self, _: int) -> Iterator[Any]:
        import torch

        from data_prep.inspect import open_shard
        from data_prep.shard import Manifest

        for info in Manifest.read(self.folder).shards("train"):
            shard = open_shard(self.folder, info)
            for at in range(0, info.tokens, 1 << 20):
                yield torch.from_numpy(shard.tokens[at : at + (1 << 20)].astype(np.int32))


def datasets_loader(dataset: str, out: str, rows: int) -> dict[str, float]:
    """The same from a memory-mapped `datasets` table of 16-bit rows, looked up in random order."""
    import datasets
    import torch

    from data_prep.inspect import open_shard
    from data_prep.shard import Manifest

    def table() -> Iterator[dict[str, Any]]:
        for info in Manifest.read(dataset).shards("train"):
            tokens = open_shard(dataset, info).tokens
            for at in range(0, len(tokens) - 2049, 2049):
                yield {"ids": tokens[at : at + 2049]}

    features = datasets.Features({"ids": datasets.Sequence(datasets.Value("uint16"), length=2049)})
    made = datasets.Dataset.from_generator(table, features=features, cache_dir=f"{out}/cache").with_format("numpy")
    order = np.random.default_rng(0).permutation(len(made))

    def batches() -> Iterator[Any]:
        for at in range(0, len(order) - 8, 8):
            yield torch.from_numpy(made[order[at : at + 8]]["ids"].astype(np.int64))

    return _time_rows(batches, rows // 8, lambda batch: batch[0], group=1, rows_each=8)


def _time_rows(
    source: Callable[[], Iterator[Any]],
    count: int,
    join: Callable[[list[Any]], Any],
    group: int = 8,
    rows_each: int = 1,
) -> dict[str, float]:
    """Seconds for `count` items from `source`, joined `group` at a time and split into inputs and labels."""
    items, taken, start = source(), 0, 0.0
    warm = max(count // 10, group)
    while taken < warm + count:
        if taken >= warm and not start:
            start, begun = time.perf_counter(), taken
        held = []
        for _ in range(group):
            item = next(items, None)
            if item is None:
                items = source()
                item = next(items)
            held.append(item)
        batch = join(held)
        batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        taken += group
    return {"seconds": time.perf_counter() - start, "tokens": (taken - begun) * rows_each * 2048}


def _in_parts(corpus: str, out: str, workers: int) -> Path:
    """The corpus dealt out to files: these peers share out work by file."""
    folder = Path(out) / "parts"
    folder.mkdir(parents=True)
    files = [open(folder / f"{i}.jsonl", "wb") for i in range(2 * workers)]  # noqa: SIM115
    with open(corpus, "rb") as lines:
        for number, line in enumerate(lines):
            files[number % len(files)].write(line)
    for file in files:
        file.close()
    return folder


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    try:
        found = globals()[name](*(int(a) if a.isdigit() else a for a in arguments))
    except ImportError as error:
        found = {"missing": str(error)}
    print(json.dumps(found))
