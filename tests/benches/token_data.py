"""megatron-core's side of `token_data.rs`, which starts it: `token_data.py FOLDER SEQ SAMPLES`.

Reads a command from each line of its input, and answers with a number:

    build SEED                the seconds in which the indices were built and saved
    read COUNT                the seconds in which so many samples of them were read
    compare SEED COUNT FOLDER a sum over samples, once the indices equal those in the folder
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split


class Tokenizer:
    vocab_size = 50_000
    eod = 0
    pad = -1
    unique_identifiers = {"class": "Tokenizer"}


class Side:
    def __init__(self, folder, seq, samples):
        self.prefix = f"{folder}/x"
        self.seq, self.samples = seq, samples
        self.file = IndexedDataset(self.prefix)
        self.cache = tempfile.mkdtemp(dir=folder)
        self.dataset = None

    def build(self, seed):
        config = GPTDatasetConfig(
            random_seed=seed, sequence_length=self.seq, split="1", blend=([self.prefix], None),
            tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False, create_attention_mask=False, path_to_cache=self.cache,
        )
        sequences = numpy.arange(len(self.file), dtype=numpy.int32)
        started = time.perf_counter()
        self.dataset = GPTDataset(
            self.file, self.prefix, sequences, self.samples, Split.train, config
        )
        return time.perf_counter() - started

    def read(self, count):
        started = time.perf_counter()
        for number in range(count):
            self.dataset[number]
        return time.perf_counter() - started

    def compare(self, seed, count, folder):
        self.build(seed)
        for name in ["document_index", "sample_index", "shuffle_index"]:
            (path,) = Path(folder).glob(f"*-{name}.npy")
            ours, theirs = numpy.load(path, mmap_mode="r"), getattr(self.dataset, name)
            assert ours.dtype == theirs.dtype and numpy.array_equal(ours, theirs), name
        places = numpy.arange(1, self.seq + 1)
        sums = (
            (number + 1) * ((item["tokens"] + item["labels"]).numpy() * places).sum()
            for number, item in ((number, self.dataset[number]) for number in range(count))
        )
        return sum(int(each) for each in sums)


def main():
    folder, seq, samples = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    side = Side(folder, seq, samples)
    for line in sys.stdin:
        command, *values = line.split()
        if command == "build":
            answer = side.build(int(values[0]))
        elif command == "read":
            answer = side.read(int(values[0]))
        else:
            answer = side.compare(int(values[0]), int(values[1]), values[2])
        print(answer, flush=True)


if __name__ == "__main__":
    main()
