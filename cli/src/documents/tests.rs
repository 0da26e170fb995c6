use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;

use super::*;

/// The folder of the fixtures; see its `make.py`.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/documents");

/// The default extensions of a test.
const DEFAULT: &[&[&str]] = &[&TEXT, &RECORDS];

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    path
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

fn found(path: &Path, extensions: &[&str], keys: &[&str]) -> Result<Found, String> {
    let strings = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let options = FindOptions {
        extensions: &strings(extensions),
        default_extensions: DEFAULT,
        format: Format::Auto,
        text: DocumentFormat::Whole,
        keys: &strings(keys),
    };
    find(&[path.to_path_buf()], &options).map_err(|error| error.to_string())
}

/// Returns the texts of all documents under the keys, and the file counts as text.
fn read(path: &Path, extensions: &[&str], keys: &[&str]) -> Result<(Vec<String>, String), String> {
    let Found { inputs, counts } = found(path, extensions, keys)?;
    let keys: Vec<_> = keys.iter().map(ToString::to_string).collect();
    let mut texts = vec![];
    for input in inputs {
        let bytes = Arc::new(AtomicU64::new(0));
        let opened = input.open(&keys, 1 << 20, &bytes);
        let mut source = opened.map_err(|error| error.to_string())?;
        loop {
            match source.next().map_err(|error| error.to_string())? {
                NextDocument::Document(content) => {
                    texts.extend(content.texts(&keys).map_err(|error| error.to_string())?)
                }
                NextDocument::TooLong => return Err("too long".into()),
                NextDocument::End => break,
            }
        }
        let bytes = bytes.load(Ordering::Relaxed);
        // The index of an Arrow file is read twice.
        assert!(
            bytes > 0 && bytes <= 2 * input.bytes,
            "{bytes} of {}",
            input.bytes
        );
    }
    Ok((texts, counts.to_string()))
}

#[test]
fn compressed_files_are_read_whatever_their_name() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "\u{feff}{\"text\": \"one\"}\n\n{\"text\": \"two\"}\n";
    let expected = ["one", "", "two"].map(String::from).to_vec();
    let zstd = zstd::encode_all(lines.as_bytes(), 1).unwrap();
    for (name, content) in [
        ("a.jsonl", lines.as_bytes()),
        ("b.jsonl.gz", &gzip(lines.as_bytes())),
        ("c.jsonl.zst", &zstd),
        ("d.jsonl", &gzip(lines.as_bytes())),
        ("e.ndjson", &zstd),
    ] {
        let path = write(&folder, name, content);
        assert_eq!(read(&path, &[], &["text"]).unwrap().0, expected, "{name}");
    }
    let twice = write(&folder, "twice.txt.gz", gzip(&gzip(b"text")));
    let error = read(&twice, &[], &["text"]).unwrap_err();
    assert!(error.contains("is compressed twice, not text"), "{error}");
    let zip = write(&folder, "zip.txt.gz", gzip(b"PK\x03\x04\x14\0\0\0"));
    let error = read(&zip, &[], &["text"]).unwrap_err();
    assert!(
        error.contains("is a zip archive, not text: `unzip "),
        "{error}"
    );
    let latin = write(&folder, "latin.txt", b"caf\xe9");
    let error = read(&latin, &[], &["text"]).unwrap_err();
    assert!(
        error.starts_with("the text is not UTF-8 from byte 3 on; `iconv"),
        "{error}"
    );
}

#[test]
fn files_of_a_folder_are_chosen_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "README.md", "about");
    write(&folder, "b/a.jsonl", "{\"text\": \"one\"}");
    write(&folder, "b/b.py", "x = 1");
    write(&folder, "Makefile", "all:");
    let read = |extensions: &[&str]| read(folder.path(), extensions, &["text"]).unwrap();
    // The only other text in the folder of records is a README.
    let (texts, counts) = read(&[]);
    assert_eq!(texts, ["one"]);
    insta::assert_snapshot!(
        counts,
        @"1 file read, 3 left out (.md 1, .py 1, without an extension 1)"
    );
    write(&folder, "c.TXT.gz", gzip(b"two"));
    let (texts, counts) = read(&[]);
    assert_eq!(texts, ["about", "two"]);
    let left_out = "2 files read, 3 left out (.jsonl 1, .py 1, without an extension 1)";
    assert_eq!(counts, left_out);
    let (texts, counts) = read(&[".PY", "jsonl"]);
    assert_eq!(texts, ["one", "x = 1"]);
    assert!(counts.starts_with("2 files read, 3 left out ("), "{counts}");
    let error = found(folder.path(), &["rs"], &["text"]).unwrap_err();
    assert!(
        error
            .contains("ends in .rs, optionally followed by .gz or .zst: there are .jsonl 1, .md 1"),
        "{error}"
    );
}

#[test]
fn conversations_are_told_from_texts() {
    let folder = tempfile::tempdir().unwrap();
    for (name, line, is) in [
        (
            "a.jsonl",
            "\n{\"id\": {\"text\": 1}, \"messages\": []}",
            true,
        ),
        (
            "b.jsonl",
            "{\"prompt\": \"a\", \"completion\": \"b\"}",
            true,
        ),
        ("c.jsonl", "{\"prompt\": \"a\"}", true),
        ("d.jsonl", "{\"prompt\": \"a\", \"text\": \"b\"}", false),
        ("e.jsonl", "{\"text\": \"b\"}", false),
        ("f.jsonl", "[1]", false),
        ("g.txt", "{\"messages\": []}", false),
    ] {
        assert_eq!(is_conversation(&write(&folder, name, line)), is, "{name}");
    }
}

#[cfg(not(feature = "parquet"))]
#[test]
fn tables_name_the_feature_and_what_converts_them() {
    for (name, converts) in [
        ("snappy.parquet", "pandas.read_parquet("),
        ("large.arrow", "pandas.read_feather("),
        ("saved", "datasets.Dataset.from_file("),
    ] {
        let error = found(&Path::new(FIXTURES).join(name), &[], &["text"]).unwrap_err();
        assert!(error.contains("without the feature parquet"), "{error}");
        assert!(
            error.contains("--features parquet`") && error.contains(converts),
            "{error}"
        );
    }
}

#[cfg(feature = "parquet")]
mod tables {
    use insta::assert_snapshot;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(FIXTURES).join(name)
    }

    /// Returns the texts that `make.py` writes.
    fn texts(rows: std::ops::Range<usize>) -> Vec<String> {
        let text = |i: usize| format!("row {i} {}", "naïve 日本 ".repeat(i % 3));
        rows.map(text).collect()
    }

    #[test]
    fn every_encoding_has_the_same_rows() {
        let codecs = ["snappy", "zstd", "gzip", "lz4", "none", "required"];
        let parquet = codecs.map(|codec| format!("{codec}.parquet"));
        let arrow = ["large.arrow", "view.arrow"].map(String::from);
        for name in parquet.iter().chain(&arrow) {
            let read = read(&fixture(name), &[], &["text"]);
            assert_eq!(read.unwrap().0, texts(0..100), "{name}");
        }
    }

    #[test]
    fn folders_of_datasets_have_their_training_rows() {
        for (name, counts) in [
            ("hub", "2 files read, 2 left out (.md 1, split test 1)"),
            ("saved", "2 files read, 2 left out (.json 2)"),
            ("saved_dict", "1 file read, 6 left out (.json 5, .arrow 1)"),
        ] {
            let (rows, found) = read(&fixture(name), &[], &["text"]).unwrap();
            assert_eq!(rows, texts(0..100), "{name}");
            assert_eq!(found, counts, "{name}");
        }
        let test = read(&fixture("saved_dict/test"), &[], &["text"]);
        assert_eq!(test.unwrap().0, texts(100..110));
        // Datasets with several configurations have a folder for each configuration.
        let folder = tempfile::tempdir().unwrap();
        write(&folder, "README.md", "about");
        let copy = |from: &str, to: &str| {
            write(&folder, to, fs::read(fixture(from)).unwrap());
        };
        copy(
            "hub/data/test-00000-of-00001.parquet",
            "en/x/train-00000-of-00001.parquet",
        );
        copy("snappy.parquet", "en/x/validation-00000-of-00001.parquet");
        let (rows, counts) = read(folder.path(), &[], &["text"]).unwrap();
        assert_eq!(rows, texts(100..110));
        assert_snapshot!(counts, @"1 file read, 2 left out (.md 1, split validation 1)");
        fs::rename(
            folder.path().join("en/x/train-00000-of-00001.parquet"),
            folder.path().join("en/x/test-00000-of-00001.parquet"),
        )
        .unwrap();
        let error = found(folder.path(), &[], &["text"]).unwrap_err();
        assert!(
            error.contains("the splits test, validation, and none is named train"),
            "{error}"
        );
    }

    #[test]
    fn columns_are_chosen_and_must_be_text() {
        let two = read(&fixture("snappy.parquet"), &[], &["title", "text"]);
        assert_snapshot!(two.unwrap_err(), @"the value of `title` is not a string");
        let Found { inputs, .. } =
            found(&fixture("snappy.parquet"), &[], &["title", "text"]).unwrap();
        let keys = ["title", "text"].map(String::from);
        let mut source = inputs[0].open(&keys, 1 << 20, &Arc::default()).unwrap();
        let mut titles = vec![];
        while let NextDocument::Document(DocumentContent::Row(row)) = source.next().unwrap() {
            let text = row[1].clone().map(|text| String::from_utf8(text).unwrap());
            assert_eq!(text.as_ref(), texts(0..100).get(titles.len()));
            titles.push(
                row[0]
                    .clone()
                    .map(|title| String::from_utf8(title).unwrap()),
            );
        }
        let title = |i: usize| (!i.is_multiple_of(5)).then(|| format!("title {i}"));
        assert_eq!(titles, (0..100).map(title).collect::<Vec<_>>());
        for (name, columns) in [
            ("zstd.parquet", "`id`, `text`, `title`"),
            ("saved/data-00000-of-00002.arrow", "`id`, `text`, `title`"),
            ("large.arrow", "`text`"),
        ] {
            let error = found(&fixture(name), &[], &["id"]).unwrap_err();
            let says = "has no column of text `id` (see --json-key): its columns are ";
            assert!(error.ends_with(&format!("{says}{columns}")), "{error}");
        }
    }

    #[test]
    fn tables_that_are_cut_or_packed_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "none.parquet",
            "view.arrow",
            "saved/data-00000-of-00002.arrow",
        ] {
            let bytes = fs::read(fixture(name)).unwrap();
            let cut = write(&folder, name, &bytes[..bytes.len() - 400]);
            let error = read(&cut, &[], &["text"]).unwrap_err();
            assert!(!error.is_empty(), "{name}");
            let packed = write(&folder, &format!("{name}.gz"), gzip(&bytes));
            let error = read(&packed, &[], &["text"]).unwrap_err();
            assert!(error.contains("it has its own compression"), "{error}");
            let overwritten = write(&folder, name, &b"<html>not found</html>"[..]);
            let error = read(&overwritten, &[], &["text"]).unwrap_err();
            assert!(error.contains("is a damaged "), "{error}");
            let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
            let error = read(&write(&folder, name, pointer), &[], &["text"]).unwrap_err();
            assert!(error.contains("Git LFS"), "{error}");
        }
    }
}
