use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use burn_megatron_test_support::TestFolder;

/// Expected values from the Python library: see `make.py` next to the file.
#[derive(Deserialize)]
struct Reference {
    vocabulary: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    tokens: Vec<u32>,
    framed: Vec<u32>,
    decoded: String,
    whole: String,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/tokenizer")
        .join(name)
}

fn open(name: &str) -> Tokenizer {
    Tokenizer::open(&fixture(name)).unwrap()
}

fn references() -> BTreeMap<String, Reference> {
    serde_json::from_slice(&fs::read(fixture("cases.json")).unwrap()).unwrap()
}

fn streamed(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let pushed = tokens.iter().map(|token| stream.push(*token).unwrap());
    let mut pieces: Vec<String> = pushed.collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

#[test]
fn tokens_and_texts_are_those_of_the_python_library() {
    let mut compared = 0;
    for (name, reference) in references() {
        let tokenizer = open(&name);
        assert_eq!(tokenizer.vocabulary(), reference.vocabulary, "{name}");
        for case in reference.cases {
            let place = format!("{name}: {:?}", case.text);
            assert_eq!(
                tokenizer.encode(&case.text).unwrap(),
                case.tokens,
                "{place}"
            );
            let framed = tokenizer.encode_with_special_tokens(&case.text).unwrap();
            let [before, after] = tokenizer.frame().unwrap();
            assert_eq!(
                [&before[..], &case.tokens, &after].concat(),
                framed,
                "{place}"
            );
            assert_eq!(framed, case.framed, "{place}");
            let bytes = tokenizer.encode_bytes(case.text.as_bytes(), false).unwrap();
            assert_eq!(bytes, case.tokens, "{place}");
            assert_eq!(tokenizer.decode(&framed).unwrap(), case.decoded, "{place}");
            let whole = tokenizer.decode_with_special_tokens(&framed).unwrap();
            assert_eq!(whole, case.whole, "{place}");
            compared += 1;
        }
    }
    assert_eq!(compared, 4 * 18);
}

#[test]
fn a_stream_gives_the_same_text_in_pieces() {
    for (name, reference) in references() {
        let tokenizer = open(&name);
        for case in reference.cases {
            let pieces = streamed(&tokenizer, &case.framed);
            // The tokenizer removes a space before a punctuation mark when the mark follows, but the stream has already
            // returned the space.
            if name != "word_piece" {
                assert_eq!(pieces.concat(), case.decoded, "{name}: {:?}", case.text);
            }
            let (_, before_end) = pieces.split_last().unwrap();
            let replaced = case.text.contains(REPLACEMENT);
            let cut = before_end.iter().any(|piece| piece.contains(REPLACEMENT));
            assert!(replaced || !cut, "{name}: {pieces:?}");
        }
    }
}

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

#[test]
fn a_stream_waits_for_whole_characters() {
    for tokenizer in [Tokenizer::bytes(), open("byte_fallback")] {
        let text = "a日👍🏽";
        let tokens = tokenizer.encode(text).unwrap();
        let mut pieces = streamed(&tokenizer, &tokens);
        pieces.retain(|piece| !piece.is_empty());
        assert_eq!(pieces.concat(), text, "{tokenizer:?}");
        assert_eq!(pieces.last().unwrap(), "🏽", "{tokenizer:?}");
        let cut = streamed(&tokenizer, &tokens[..tokens.len() - 1]);
        assert!(cut.last().unwrap().starts_with(REPLACEMENT), "{cut:?}");
    }
}

#[test]
fn a_long_stream_keeps_few_tokens() {
    let tokenizer = open("byte_bpe");
    let mut stream = tokenizer.stream();
    for token in tokenizer.encode(&"fox and dog; ".repeat(200)).unwrap() {
        stream.push(token).unwrap();
        assert!(stream.tokens.len() < 8, "{stream:?}");
    }
}

#[test]
fn special_tokens_come_from_the_files_beside_it() {
    let special = open("byte_bpe").special().clone();
    assert_eq!(
        (special.bos, special.eos, special.eod),
        (Some(0), Some(0), Some(0))
    );
    let special = open("byte_fallback").special().clone();
    assert_eq!(
        (special.bos, special.eos, special.pad),
        (Some(1), Some(2), None)
    );
    let bert = open("word_piece");
    let special = bert.special();
    assert_eq!(
        (special.eos, special.eod, special.pad),
        (None, None, Some(0))
    );
    assert_eq!(bert.clone().with_eod("[SEP]").unwrap().eod(), Some(3));
    let error = bert.with_eod("[sep]").unwrap_err().to_string();
    let listed = "has no token `[sep]`; its special tokens are [PAD], [UNK], [CLS], [SEP], [MASK]";
    assert!(error.ends_with(listed), "{error}");
}

/// Returns a folder that contains only the tokenizer file.
fn alone() -> TestFolder {
    let folder = TestFolder::new();
    let content = fs::read(fixture("byte_fallback/tokenizer.json")).unwrap();
    folder.write("tokenizer.json", content);
    folder
}

#[test]
fn the_strongest_file_decides_and_all_ends_are_known() {
    let folder = alone();
    let special = || Tokenizer::open(folder.path()).unwrap().special().clone();
    assert_eq!(special(), SpecialTokens::default());
    folder.write("config.json", r#"{"eos_token_id": 7, "bos_token_id": 1}"#);
    assert_eq!((special().eos, special().bos), (Some(7), Some(1)));
    folder.write("generation_config.json", r#"{"eos_token_id": [9, 7]}"#);
    assert_eq!(
        (special().eos, special().stop_tokens),
        (Some(9), vec![7, 9])
    );
    folder.write(
        "special_tokens_map.json",
        r#"{"eos_token": {"content": "</s>"}}"#,
    );
    assert_eq!(
        (special().eos, special().stop_tokens),
        (Some(2), vec![2, 7, 9])
    );
    folder.write(
        "tokenizer_config.json",
        r#"{"eos_token": "<unk>", "pad_token": null}"#,
    );
    assert_eq!((special().eos, special().pad), (Some(0), None));
}

#[test]
fn contents_of_files_make_the_tokenizer_of_their_folder() {
    for name in ["byte_bpe", "byte_fallback", "unigram", "word_piece"] {
        let folder = fixture(name);
        let mut files: BTreeMap<_, _> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                (name, fs::read(entry.path()).unwrap())
            })
            .collect();
        files.insert("merges.txt".into(), b"nothing of this".to_vec());
        let (own, other) = (open(name), Tokenizer::from_files(&folder, &files).unwrap());
        assert_eq!(own.name(), other.name());
        assert_eq!(own.fingerprint(), other.fingerprint());
        assert_eq!(own.vocabulary(), other.vocabulary());
        assert_eq!(own.special(), other.special());
        let text = "The quick naïve 日";
        let framed = own.encode_with_special_tokens(text).unwrap();
        assert_eq!(other.encode_with_special_tokens(text).unwrap(), framed);
        let error = |files: &BTreeMap<_, _>| {
            let made = Tokenizer::from_files("kept".as_ref(), files);
            made.unwrap_err().to_string()
        };
        files.insert("config.json".into(), br#"{"eos_token_id": 99999}"#.to_vec());
        files.remove("tokenizer_config.json");
        let text = error(&files);
        assert!(
            text.contains("config.json' has the eos_token_id `99999`"),
            "{text}"
        );
        files.insert("tokenizer.json".into(), b"{}".to_vec());
        let text = error(&files);
        assert!(
            text.contains("tokenizer.json' does not describe a tokenizer"),
            "{text}"
        );
        files.remove("tokenizer.json");
        let text = error(&files);
        assert!(text.starts_with("no tokenizer at 'kept"), "{text}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    let error = |path: &Path| Tokenizer::open(path).unwrap_err().to_string();
    let folder = TestFolder::new();
    let text = error(folder.path());
    assert!(
        text.contains("tokenizer.json") && text.contains("`bytes`"),
        "{text}"
    );
    folder.write("tokenizer.json", "{}");
    let text = error(folder.path());
    assert!(text.contains("does not describe a tokenizer"), "{text}");
    let folder = alone();
    folder.write("config.json", r#"{"eos_token_id": 4096}"#);
    let text = error(folder.path());
    assert!(
        text.contains("config.json' has the eos_token_id `4096`"),
        "{text}"
    );
    folder.write("config.json", "{}");
    folder.write(
        "tokenizer_config.json",
        r#"{"bos_token": "<bos>", "eos_token": "</s>"}"#,
    );
    let text = error(folder.path());
    assert!(
        text.contains("tokenizer_config.json' has the bos_token `<bos>`"),
        "{text}"
    );
    folder.write("tokenizer_config.json", "[");
    assert!(
        error(folder.path()).contains("tokenizer_config.json"),
        "{text}"
    );
    let text = open("byte_bpe")
        .encode_bytes(b"ab\xff", false)
        .unwrap_err()
        .to_string();
    insta::assert_snapshot!(text, @"the text is not UTF-8 from byte 2 on");
}

#[test]
fn a_damaged_file_is_an_error_or_another_tokenizer() {
    let folder = TestFolder::new();
    for name in ["byte_bpe", "byte_fallback", "unigram", "word_piece"] {
        let content = fs::read(fixture(name).join("tokenizer.json")).unwrap();
        for cut in (0..content.len()).step_by(content.len() / 40) {
            folder.write("tokenizer.json", &content[..cut]);
            assert!(
                Tokenizer::open(folder.path()).is_err(),
                "{name} cut at {cut}"
            );
        }
        for at in (0..content.len()).step_by(content.len() / 200) {
            let mut damaged = content.clone();
            damaged[at] ^= 0x15;
            folder.write("tokenizer.json", damaged);
            if let Ok(tokenizer) = Tokenizer::open(folder.path()) {
                // Damaged files are parsed or refused, and a parsed tokenizer does not panic.
                let _ = tokenizer.encode("The quick naïve 日");
            }
        }
    }
}

#[test]
fn bytes_are_tokens() {
    let bytes = Tokenizer::named("bytes").unwrap();
    assert_eq!((bytes.vocabulary(), bytes.eod()), (256, Some(0)));
    assert_eq!(bytes.encode_bytes(b"\xff\0a", false).unwrap(), [255, 0, 97]);
    assert_eq!(bytes.decode(&[97, 300, 98]).unwrap(), "ab");
    assert_eq!(bytes.id("a"), Some(97));
    assert_ne!(bytes.fingerprint(), open("byte_bpe").fingerprint());
}

#[test]
fn the_description_of_token_files_is_written_and_read_back() {
    let folder = TestFolder::new();
    let prefix = folder.path().join("corpus.v1");
    assert_eq!(TokenFileInfo::read(&prefix).unwrap(), None);
    let mut info = TokenFileInfo::new(&open("byte_bpe"));
    assert_eq!(info.bytes_per_token(), None);
    (info.bytes, info.tokens) = (300, 120);
    info.write(&prefix).unwrap();
    assert_eq!(TokenFileInfo::read(&prefix).unwrap(), Some(info.clone()));
    assert_eq!(info.bytes_per_token(), Some(2.5));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    folder.write("corpus.v1.json", "{");
    let text = TokenFileInfo::read(&prefix).unwrap_err().to_string();
    assert!(text.contains("corpus.v1.json"), "{text}");
    let text = info.write(&folder.path().join("none/corpus")).unwrap_err();
    assert!(text.to_string().contains("cannot write"), "{text}");
}

proptest! {
    #[test]
    fn bytes_stream_as_they_decode(tokens in prop::collection::vec(0u32..256, 0..40)) {
        let bytes = Tokenizer::bytes();
        prop_assert_eq!(streamed(&bytes, &tokens).concat(), bytes.decode(&tokens).unwrap());
    }

    #[test]
    fn any_text_survives_byte_level_tokens(text in ".{0,60}") {
        for name in ["byte_bpe", "byte_fallback"] {
            let tokenizer = open(name);
            let tokens = tokenizer.encode(&text).unwrap();
            prop_assert!(tokens.iter().all(|token| (*token as usize) < tokenizer.vocabulary()));
            let decoded = tokenizer.decode_with_special_tokens(&tokens).unwrap();
            prop_assert_eq!(&decoded, &text);
            prop_assert_eq!(streamed(&tokenizer, &tokens).concat(), tokenizer.decode(&tokens).unwrap());
        }
    }
}
