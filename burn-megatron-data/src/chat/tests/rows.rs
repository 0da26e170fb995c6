//! Rows of complete examples from a file.

use super::super::*;
use crate::{Batch, IGNORE};
use burn_megatron_test_support::TestFolder;
use insta::assert_snapshot;

/// Returns a file with an empty line and plain examples of 3 to 12 tokens.
fn file(folder: &TestFolder, examples: usize) -> PathBuf {
    let lines = (0..examples).map(|i| {
        let prompt = "p".repeat(1 + i % 7);
        format!(
            "{{\"prompt\": \"{prompt}\", \"completion\": \"{}\"}}\r\n",
            i % 1000
        )
    });
    folder.write(
        "chat.jsonl",
        format!("\u{feff}\n{}", lines.collect::<String>()),
    );
    folder.path().join("chat.jsonl")
}

fn config(files: PathBuf, seq: usize) -> ChatDataConfig {
    ChatDataConfig {
        files: vec![files],
        held_out: HeldOutExamples::Share(0.2),
        loss: TrainedTokens::Answers,
        long: LongExamples::Truncate,
        packing: true,
        seq,
    }
}

fn open(config: ChatDataConfig) -> Result<ChatData, String> {
    let opened = ChatData::open(config, &Tokenizer::bytes(), None, &mut |_| {});
    opened.map_err(|error| error.to_string())
}

/// Returns the examples of a row, as inputs and targets.
fn documents(sample: &Sample) -> Vec<(Vec<i32>, Vec<i32>)> {
    let length = sample.tokens.len();
    let ends = sample.documents[1..].iter().chain([&length]);
    let each = sample.documents.iter().zip(ends).map(|(begin, end)| {
        let of = |all: &[i32]| all[*begin..*end].to_vec();
        (of(&sample.tokens), of(&sample.targets))
    });
    each.filter(|(_, targets)| targets.iter().any(|target| *target != IGNORE))
        .collect()
}

#[test]
fn rows_hold_whole_examples_and_every_one_once_per_epoch() {
    let folder = TestFolder::new();
    let path = file(&folder, 10_000);
    let mut read = 0;
    let data = ChatData::open(
        config(path.clone(), 32),
        &Tokenizer::bytes(),
        None,
        &mut |bytes| read += bytes,
    );
    let data = data.unwrap();
    assert_eq!(read, std::fs::metadata(&path).unwrap().len());
    let rows = data.rows() as u64;
    let sampling = |seed, samples| Sampling {
        seq: 32,
        seed,
        samples,
    };
    let samples = data.training(&sampling(5, 2 * rows)).unwrap();
    let epoch = |samples: &Arc<dyn Samples>, epoch: u64| {
        let rows = (epoch * rows..(epoch + 1) * rows).map(|number| samples.sample(number).unwrap());
        rows.collect::<Vec<_>>()
    };
    let first = epoch(&samples, 0);
    assert!(
        first
            .iter()
            .all(|row| row.tokens.len() == 32 && row.targets.len() == 32)
    );
    let padding = |row: &Sample| {
        row.targets
            .iter()
            .rev()
            .take_while(|to| **to == IGNORE)
            .count()
    };
    assert!(first.iter().all(|row| row.padding == padding(row)));
    assert!(first.iter().any(|row| row.padding > 0));
    let texts = |rows: &[Sample]| {
        let examples = rows.iter().flat_map(documents).map(|(tokens, targets)| {
            let prompt = tokens
                .iter()
                .take_while(|token| **token == i32::from(b'p'))
                .count();
            assert_eq!(targets[..prompt - 1], vec![IGNORE; prompt - 1]);
            assert_eq!(
                targets[prompt - 1..targets.len() - 1],
                tokens[prompt..],
                "shifted by one"
            );
            assert_eq!(targets.last(), Some(&0), "the end has a loss");
            let number = tokens[prompt..].iter().map(|token| *token as u8 as char);
            (prompt, number.collect::<String>())
        });
        let mut texts: Vec<_> = examples.collect();
        texts.sort();
        texts
    };
    let held_out = data.held_out(32, usize::MAX).unwrap();
    assert_eq!(data.held_out(32, 3).unwrap(), held_out[..3]);
    let mut all = [texts(&first), texts(&held_out)].concat();
    assert_eq!((texts(&first).len(), all.len()), (8000, 10_000));
    all.sort();
    let mut expected: Vec<_> = (0..10_000)
        .map(|i| (1 + i % 7, (i % 1000).to_string()))
        .collect();
    expected.sort();
    assert_eq!(all, expected);
    // Each epoch has the same rows in a different order. The first samples do not depend on the length of the run.
    let second = epoch(&samples, 1);
    assert_ne!(first, second);
    assert_eq!(texts(&first), texts(&second));
    let shorter = data.training(&sampling(5, 3)).unwrap();
    assert_eq!(shorter.batch(0..9).unwrap(), samples.batch(0..9).unwrap());
    let other = data.training(&sampling(6, 3)).unwrap();
    assert_ne!(other.batch(0..9).unwrap(), samples.batch(0..9).unwrap());
    assert_eq!(samples.sample(0).unwrap(), first[0], "after another epoch");
    // The result does not depend on the number of threads.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    let one = pool.install(|| open(config(path.clone(), 32)).unwrap());
    assert_eq!(one.fingerprint(), data.fingerprint());
    let described = data.describe();
    assert!(
        described.contains("8,000 conversations to train on, 2,000 held out"),
        "{described}"
    );
    assert!(data.training.fill_ratio() > 0.97, "{described}");
    // One example in each row.
    let alone = open(ChatDataConfig {
        packing: false,
        ..config(path, 32)
    })
    .unwrap();
    assert_eq!(alone.rows(), 8000);
    let batch = Batch::new((0..4).map(|row| alone.training.sample(row))).unwrap();
    assert_eq!(batch.documents.unwrap().len(), 2 * 4 + 1);
    assert_ne!(alone.fingerprint(), data.fingerprint());
    assert!(
        data.held_out(31, 1)
            .unwrap_err()
            .to_string()
            .contains("rows of 32 tokens, not 31")
    );
}

#[test]
fn long_examples_are_counted_or_refused() {
    let folder = TestFolder::new();
    let path = folder.path().join("chat.jsonl");
    let line = |prompt: usize, answer: usize| {
        let [prompt, answer] =
            [("p", prompt), ("a", answer)].map(|(letter, count)| letter.repeat(count));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{answer}\"}}\n")
    };
    // An example of 9 tokens, which fits because its last token is only a target, an example of 10 tokens, and an
    // example whose prompt has 9 tokens.
    folder.write("chat.jsonl", line(4, 4) + &line(4, 5) + &line(9, 1));
    let with = |long, held_out| {
        let config = config(path.clone(), 8);
        open(ChatDataConfig {
            long,
            held_out: HeldOutExamples::Share(held_out),
            ..config
        })
    };
    let truncated = with(LongExamples::Truncate, 0.0).unwrap();
    assert_eq!(truncated.training.examples.len(), 2);
    let described = truncated.describe();
    assert!(
        described.ends_with("full; 1 truncated; 1 left out (the prompt fills a row)"),
        "{described}"
    );
    let cut = truncated.training.sample(1);
    assert_eq!(cut.targets[7], i32::from(b'a'), "its end is cut off");
    assert!(truncated.held_out(8, 9).unwrap().is_empty());
    let dropped = with(LongExamples::Drop, 0.0).unwrap();
    assert!(
        dropped
            .describe()
            .ends_with("; 2 left out (longer than a row)")
    );
    let error = with(LongExamples::Refuse, 0.0).err().unwrap();
    assert!(
        error.contains(
            "chat.jsonl', line 2: it has 10 tokens, and a row of 8 has space for 9: use a \
                        train.sequence_length of at least 9"
        ),
        "{error}"
    );
    let error = with(LongExamples::Drop, 0.5).err().unwrap();
    assert!(
        error.contains("cannot be held out of 1 conversation(s)"),
        "{error}"
    );
    assert!(
        with(LongExamples::Drop, 1.0)
            .err()
            .unwrap()
            .contains("invalid share 1")
    );
    folder.write("chat.jsonl", line(9, 9));
    let error = with(LongExamples::Drop, 0.0).err().unwrap();
    assert_snapshot!(error, @"no conversation to train on; 1 left out (longer than a row)");
    folder.write("chat.jsonl", b"\n{\"\xff");
    let error = with(LongExamples::Drop, 0.5).err().unwrap();
    assert!(
        error.ends_with("line 2: it is not UTF-8 from byte 2 on"),
        "{error}"
    );
    folder.write("chat.jsonl", "");
    assert_snapshot!(with(LongExamples::Drop, 0.5).err().unwrap(), @"no conversation to train on");
    // The held-out examples are in other files or folders.
    folder.write("held/a.jsonl", line(1, 1));
    folder.write("chat.jsonl", line(2, 2) + "\n{}\n");
    let held_out = HeldOutExamples::Files(vec![folder.path().join("held")]);
    let of = |held_out| {
        open(ChatDataConfig {
            held_out,
            ..config(path.clone(), 8)
        })
    };
    let error = of(held_out.clone()).err().unwrap();
    assert!(
        error.contains("chat.jsonl', line 3: expected an object with `prompt`"),
        "{error}"
    );
    folder.write("chat.jsonl", line(2, 2));
    let data = of(held_out).unwrap();
    assert_eq!(data.held_out(8, 9).unwrap()[0].tokens[..2], [112, 97]);
    let missing = HeldOutExamples::Files(vec![folder.path().join("none.jsonl")]);
    assert!(of(missing).err().unwrap().contains("none.jsonl"));
}
