use std::fs;
use std::io::Write;
use std::sync::atomic::AtomicUsize;

use burn_megatron_data::indexed::{IndexedDataset, bin_path, idx_path};
use insta::assert_snapshot;

use super::*;
use crate::flags::parse_text;

/// New folder, which is removed when the value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let name = format!("preprocess-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    /// Runs with these flags. `DIR` stands for the folder, and `TOK` for the folder of the tokenizers.
    fn run(&self, flags: &str) -> Result<PreprocessSummary, PreprocessError> {
        self.run_until(flags, false)
    }

    fn run_until(&self, flags: &str, stop: bool) -> Result<PreprocessSummary, PreprocessError> {
        let folder = self.0.to_str().unwrap();
        let flags = flags.replace("DIR", folder).replace("TOK", TOKENIZERS);
        let args = parse_text(&flags).unwrap();
        preprocess(&args, &Arc::new(AtomicBool::new(stop)))
    }

    fn error(&self, flags: &str) -> String {
        let error = self.run(flags).unwrap_err().to_string();
        error.replace(self.0.to_str().unwrap(), "DIR")
    }

    /// Returns the tokens of all documents under a prefix.
    fn documents(&self, prefix: &str) -> Vec<Vec<u32>> {
        let file = IndexedDataset::open(&self.0.join(prefix)).unwrap();
        assert_eq!(file.documents(), file.sequences());
        let sequences = 0..file.sequences();
        let tokens = sequences.map(|number| file.sequence(number).unwrap());
        tokens
            .map(|tokens| tokens.into_iter().map(|x| x as u32).collect())
            .collect()
    }

    /// Returns the bytes of both files of a prefix.
    fn bytes(&self, prefix: &str) -> [Vec<u8>; 2] {
        let prefix = self.0.join(prefix);
        [bin_path(&prefix), idx_path(&prefix)].map(|path| fs::read(path).unwrap())
    }

    fn info(&self, prefix: &str) -> TokenFileInfo {
        TokenFileInfo::read(&self.0.join(prefix)).unwrap().unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const TOKENIZERS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../burn-megatron-data/tests/fixtures/tokenizer"
);
const MEGATRON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/preprocess");

fn texts(documents: &[Vec<u32>]) -> Vec<String> {
    let bytes = Tokenizer::bytes();
    documents
        .iter()
        .map(|tokens| bytes.decode(tokens).unwrap())
        .collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

#[test]
fn the_files_are_those_of_megatron() {
    let folder = Folder::new();
    for tokenizer in ["byte_bpe", "byte_fallback"] {
        let flags = format!(
            "{MEGATRON}/corpus.jsonl --json-key text,title --append-eod --tokenizer TOK/{tokenizer} \
             --special-tokens=false --output DIR/{tokenizer}"
        );
        folder.run(&flags).unwrap();
        for key in ["text", "title"] {
            let name = format!("{tokenizer}_{key}");
            let theirs =
                ["bin", "idx"].map(|x| fs::read(format!("{MEGATRON}/{name}.{x}")).unwrap());
            assert_eq!(folder.bytes(&name), theirs, "{name}");
            let info = folder.info(&name);
            assert_eq!((info.documents, info.key.as_deref()), (25, Some(key)));
        }
    }
}

#[test]
fn any_number_of_workers_writes_the_same() {
    let folder = Folder::new();
    // Several batches from each of several files, compressed and uncompressed.
    let mut lines = vec![];
    for number in 0..3_000 {
        let text = "the dog and the fox ".repeat(number % 7 + 1);
        writeln!(lines, "{{\"id\": {number}, \"text\": \"{number} {text}\"}}").unwrap();
    }
    folder.write("in/b.jsonl", &lines);
    folder.write("in/a.jsonl.gz", [gzip(&lines[..0]), gzip(&lines)].concat());
    folder.write("in/c.txt.zst", zstd::encode_all(&lines[..], 1).unwrap());
    let flags = "DIR/in --tokenizer TOK/byte_bpe --lines --append-eod --output DIR";
    for workers in [1, 2, 7] {
        let summary = folder.run(&format!("{flags}/{workers} --workers {workers}"));
        let (_, info, _) = &summary.unwrap().outputs[0];
        assert_eq!(info.documents, 9_000);
    }
    let one = folder.bytes("1");
    assert!(one == folder.bytes("2") && one == folder.bytes("7"));
    let documents = folder.documents("1");
    let tokenizer = Tokenizer::open(format!("{TOKENIZERS}/byte_bpe").as_ref()).unwrap();
    for number in [0, 1, 1_234, 2_999] {
        let text = "the dog and the fox ".repeat(number % 7 + 1);
        let tokens = tokenizer.encode(&format!("{number} {text}")).unwrap();
        // The files are sorted by name. Compressed files count as their contents.
        for file in [0, 3_000] {
            let document = &documents[file + number];
            assert_eq!(document[..tokens.len()], tokens, "{number}");
            assert_eq!(document[tokens.len()..], [0]);
        }
        let line = format!("{{\"id\": {number}, \"text\": \"{number} {text}\"}}");
        let line = tokenizer.encode(&line).unwrap();
        assert_eq!(documents[6_000 + number][..line.len()], line);
    }
}

#[test]
fn text_is_cut_as_asked() {
    let folder = Folder::new();
    folder
        .write("in/b.txt", "one\r\ntwo\n\n\nthree")
        .write("in/a.md", "")
        .write("in/x.bin", "no");
    let run = |name: &str, flags: &str| {
        let flags = format!("DIR/in --tokenizer bytes --output DIR/{name} {flags}");
        let (_, info, empty) = folder.run(&flags).unwrap().outputs.remove(0);
        (texts(&folder.documents(name)), info.bytes, empty)
    };
    assert_eq!(
        run("whole", ""),
        (vec!["one\r\ntwo\n\n\nthree".into()], 16, 1)
    );
    let three = ["one", "two", "three"].map(String::from).to_vec();
    assert_eq!(run("lines", "--lines"), (three, 11, 2));
    let two = ["one\r\ntwo", "\nthree"].map(String::from).to_vec();
    assert_eq!(run("two", r"--separator \n\n"), (two, 14, 0));
    let info = folder.info("lines");
    assert_eq!(
        (info.vocabulary.unwrap(), info.eod, info.eod_appended),
        (256, Some(0), false)
    );
    assert_eq!((info.tokens, info.bytes_per_token()), (11, Some(1.0)));
    assert_eq!(info.key, None);
    assert_eq!(info.inputs.len(), 2);
}

#[test]
fn documents_can_be_framed() {
    let folder = Folder::new();
    folder.write("a.txt", "the dog");
    let flags = "DIR/a.txt --tokenizer TOK/byte_fallback --output DIR/a";
    folder.run(&format!("{flags} --append-eod")).unwrap();
    let tokenizer = Tokenizer::open(format!("{TOKENIZERS}/byte_fallback").as_ref()).unwrap();
    let expected = [
        tokenizer.encode_with_special_tokens("the dog").unwrap(),
        vec![2],
    ]
    .concat();
    assert_eq!(expected[0], 1);
    assert_eq!(folder.documents("a"), std::slice::from_ref(&expected));
    assert_eq!(folder.info("a").special_tokens, Some(true));
    let without = format!("{flags} --append-eod --overwrite --special-tokens=false");
    folder.run(&without).unwrap();
    assert_eq!(folder.documents("a"), [expected[1..].to_vec()]);
    assert_eq!(folder.info("a").special_tokens, Some(false));
    folder
        .run(&format!(
            "{flags} --append-eod --eod <unk> --overwrite --special-tokens"
        ))
        .unwrap();
    assert_eq!(folder.documents("a")[0][0], 1);
    assert_eq!(folder.documents("a")[0].last(), Some(&0));
    assert_eq!(folder.info("a").eod, Some(0));
}

#[cfg(feature = "parquet")]
#[test]
fn tables_are_read_as_lines_are() {
    let folder = Folder::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/documents");
    let lines: String = (0..100)
        .map(|i| {
            let text = format!("row {i} {}", "naïve 日本 ".repeat(i % 3));
            format!("{{\"text\": \"{text}\"}}\n")
        })
        .collect();
    folder.write("a.jsonl", lines);
    let flags = |input: &str, output: &str| {
        format!("{input} --tokenizer TOK/byte_bpe --append-eod --output DIR/{output}")
    };
    folder.run(&flags("DIR/a.jsonl", "lines")).unwrap();
    for name in ["zstd.parquet", "hub", "saved"] {
        let summary = folder
            .run(&flags(&format!("{fixtures}/{name}"), name))
            .unwrap();
        assert!(folder.bytes("lines") == folder.bytes(name), "{name}");
        assert_eq!(folder.info(name).key.as_deref(), Some("text"));
        assert!(summary.read > 0);
    }
    // A null is not a text.
    let titles = flags(&format!("{fixtures}/zstd.parquet"), "titles") + " --json-key title";
    let error = folder.error(&titles);
    assert!(
        error.contains("zstd.parquet, row 1: the value of `title` is not a string"),
        "{error}"
    );
    let skipped = folder.run(&(titles + " --skip-bad")).unwrap();
    assert_eq!((skipped.bad, folder.info("titles").documents), (20, 80));
}

#[test]
fn bad_documents_are_errors_with_their_place() {
    let folder = Folder::new();
    let lines = "{\"text\": \"one\"}\n\n{\"text\": 3}\n{\"a\": \"two\"}\n{\"text\": \"three\n{\"text\": \"four\"}\n";
    let flags = |name: &str| format!("DIR/{name} --tokenizer TOK/byte_bpe --output DIR/out");
    folder.write("a.jsonl", lines);
    let error = folder.error(&flags("a.jsonl"));
    assert_snapshot!(
        error,
        @"DIR/a.jsonl:3: the value of `text` is not a string; --skip-bad skips such documents"
    );
    folder.write(
        "b.jsonl",
        lines.split_inclusive('\n').skip(3).collect::<String>(),
    );
    let error = folder.error(&flags("b.jsonl"));
    assert!(
        error.starts_with("DIR/b.jsonl:1: the object has no `text`, only `a` (see --json-key);"),
        "{error}"
    );
    folder.write(
        "c.jsonl",
        lines.split_inclusive('\n').skip(4).collect::<String>(),
    );
    let error = folder.error(&flags("c.jsonl"));
    assert!(
        error.starts_with("DIR/c.jsonl:1: not a JSON object: "),
        "{error}"
    );
    folder.write("d.txt", b"one\ntwo\xff\nthree is too long\n");
    let error = folder.error(&(flags("d.txt") + " --lines"));
    let place = "DIR/d.txt:2: the text is not UTF-8 from byte 3 on";
    assert!(error.starts_with(place), "{error}");
    let error = folder.error(&(flags("d.txt") + " --max-document-bytes 20"));
    let place = "DIR/d.txt: the document has more than 20 bytes";
    assert!(error.starts_with(place), "{error}");
    assert_eq!(folder.names(), ["a.jsonl", "b.jsonl", "c.jsonl", "d.txt"]);

    let skipped = folder.run(&format!(
        "DIR/a.jsonl {} --lines --skip-bad --max-document-bytes 16",
        flags("d.txt")
    ));
    let skipped = skipped.unwrap();
    assert_eq!(skipped.bad, 5);
    let (_, info, empty) = &skipped.outputs[0];
    assert_eq!((info.documents, *empty), (3, 1));
}

#[test]
fn the_first_bad_document_is_told_whatever_the_workers_do() {
    let folder = Folder::new();
    let good = format!("{{\"text\": \"{}\"}}\n", "x".repeat(3000));
    let lines = good.repeat(200) + "{}\n" + &good.repeat(200) + "[]\n";
    folder.write("a.jsonl", lines);
    for workers in [1, 2, 5] {
        let error = folder.error(&format!(
            "DIR/a.jsonl --tokenizer bytes --output DIR/out --workers {workers}"
        ));
        assert!(
            error.starts_with("DIR/a.jsonl:201: the object has no"),
            "{error}"
        );
    }
    assert_eq!(folder.names(), ["a.jsonl"]);
}

#[test]
fn a_packed_file_that_is_cut_is_an_error() {
    let folder = Folder::new();
    let text = (0..9000_u32).map(|x| format!("{}\n", x.wrapping_mul(2_654_435_761)));
    let text: String = text.collect();
    let (gz, zst) = (
        gzip(text.as_bytes()),
        zstd::encode_all(text.as_bytes(), 1).unwrap(),
    );
    folder.write("a.txt.gz", &gz[..gz.len() - 9]);
    folder.write("b.txt.zst", &zst[..zst.len() - 9]);
    folder.write("c.txt.gz", "not packed at all");
    for name in ["a.txt.gz", "b.txt.zst", "c.txt.gz"] {
        let error = folder.error(&format!(
            "DIR/{name} --lines --tokenizer bytes --output DIR/out"
        ));
        assert!(
            error.starts_with(&format!("cannot read 'DIR/{name}': ")),
            "{error}"
        );
    }
    assert_eq!(folder.names().len(), 3);
}

#[test]
fn files_that_are_there_are_kept_until_others_take_their_place() {
    let folder = Folder::new();
    folder.write("a.txt", "one").write("b.txt", "two\nthree");
    let flags = |name: &str| format!("DIR/{name} --tokenizer bytes --output DIR/out");
    folder.run(&flags("a.txt")).unwrap();
    let error = folder.error(&flags("b.txt"));
    assert_snapshot!(error, @"'DIR/out.bin' exists already; --overwrite replaces it");
    folder.write("bad.jsonl", "{}");
    folder
        .run(&(flags("bad.jsonl") + " --overwrite"))
        .unwrap_err();
    let stopped = folder.run_until(&(flags("b.txt") + " --overwrite"), true);
    assert!(matches!(stopped, Err(PreprocessError::Interrupted)));
    assert_eq!(texts(&folder.documents("out")), ["one"]);
    assert_eq!(folder.info("out").documents, 1);
    folder
        .run(&(flags("b.txt") + " --overwrite --lines"))
        .unwrap();
    assert_eq!(texts(&folder.documents("out")), ["two", "three"]);
    assert_eq!(folder.info("out").documents, 2);
    let names = [
        "a.txt",
        "b.txt",
        "bad.jsonl",
        "out.bin",
        "out.idx",
        "out.json",
    ];
    assert_eq!(folder.names(), names);
    folder.write("in.json", "{\"text\": \"one\"}");
    let error = folder.error("DIR/in.json --tokenizer bytes --overwrite --output DIR/in");
    assert_snapshot!(error, @"'DIR/in.json' is both an input and an output");
}

#[test]
fn settings_without_effect_and_wrong_ones_are_errors() {
    let folder = Folder::new();
    folder
        .write("a.txt", "one")
        .write("a.jsonl", "{\"text\": \"one\"}")
        .write("none/a.x", "");
    for (flags, wanted) in [
        ("a.txt --json-key text", "--json-key requires JSON lines"),
        ("a.jsonl --lines", "--lines and --separator require text"),
        (
            "a.jsonl --separator x",
            "--lines and --separator require text",
        ),
        (
            "a.jsonl DIR/a.txt --json-key text,a",
            "several keys require JSON lines, Parquet or Arrow",
        ),
        (
            "a.jsonl --json-key text,text",
            "--json-key `text` is given twice",
        ),
        (
            "a.jsonl --json-key text,a/b",
            "--json-key `a/b` cannot be part",
        ),
        (
            "a.txt --special-tokens",
            "--special-tokens has no effect on bytes",
        ),
        (
            "none",
            "no file in 'DIR/none' ends in .rs, .md, .txt, .jsonl, .ndjson",
        ),
        ("missing.txt", "cannot read 'DIR/missing.txt'"),
        ("a.txt --eod <x>", "the tokenizer bytes has no token `<x>`"),
        (
            "none/a.x",
            "the inputs have no document with a token: 1 are empty, 0 are bad",
        ),
    ] {
        let error = folder.error(&format!("DIR/{flags} --tokenizer bytes --output DIR/out"));
        assert!(error.starts_with(wanted), "{flags}: {error}");
    }
    let error = folder.error("DIR/a.txt --tokenizer TOK/word_piece --append-eod --output DIR/out");
    assert!(
        error.contains("does not define the token that ends a document"),
        "{error}"
    );
    assert_eq!(folder.names(), ["a.jsonl", "a.txt", "none"]);
}
