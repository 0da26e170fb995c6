use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_megatron_data::indexed::{IndexedDatasetBuilder, TokenType};
use insta::assert_snapshot;

use super::settings::{DataConfig, TokenFileEntry, WeightedTokenFiles};
use super::*;
use crate::family::Model;
use burn_megatron_models::TransformerConfig;

const BPE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../burn-megatron-data/tests/fixtures/tokenizer/byte_bpe"
);

/// Folder with a text, and token files of 40 documents of 50 tokens below 256.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static FOLDERS: AtomicUsize = AtomicUsize::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let name = format!("data-of-a-recipe-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("text.txt"), "the dog and the fox ".repeat(100)).unwrap();
        let mut writer =
            IndexedDatasetBuilder::create(&path.join("tokens"), TokenType::U16).unwrap();
        for document in 0..40 {
            let tokens: Vec<u32> = (0..50).map(|token| (token * 7 + document) % 256).collect();
            writer.document(&tokens).unwrap();
        }
        writer.finish().unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn recipe(&self, vocabulary: usize, data: &str) -> Recipe {
        let data = data
            .replace("DIR", self.0.to_str().unwrap())
            .replace("BPE", BPE);
        let mut recipe = Recipe {
            data: toml::from_str(&data).unwrap(),
            ..Recipe::default()
        };
        recipe.model = Model::transformer(TransformerConfig {
            vocabulary,
            ..TransformerConfig::default()
        });
        recipe.train.sequence_length = Some(8);
        recipe.train.steps = 3;
        recipe
    }

    fn describe(&self, tokenizer: &Tokenizer) -> TokenFileInfo {
        let mut info = TokenFileInfo::new(tokenizer);
        (info.tokens, info.bytes) = (2000, 5000);
        info.write(&self.path("tokens")).unwrap();
        info
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn error(recipe: &Recipe) -> String {
    match open(recipe) {
        Ok(data) => panic!("this must not open: {}", data.describe()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_table_decides_what_is_read() {
    let folder = Folder::new();
    let bytes = open(&folder.recipe(256, "path = 'DIR/text.txt'")).unwrap();
    assert_eq!((bytes.vocabulary(), unit(&*bytes)), (256, LossUnit::Byte));
    let text = open(&folder.recipe(400, "path = 'DIR/text.txt'\ntokenizer = 'BPE'")).unwrap();
    assert_eq!(
        (text.vocabulary(), unit(&*text)),
        (400, LossUnit::TokenOfBytes)
    );
    assert!(text.bytes_per_token() > 2.0, "{}", text.describe());
    let files = "files = ['DIR/tokens']\nsplit = '90,10'";
    let files = open(&folder.recipe(300, files)).unwrap();
    assert_eq!((files.vocabulary(), unit(&*files)), (300, LossUnit::Token));
    let weighted = "files = [{prefix = 'DIR/tokens', weight = 1.0}]\nsplit = '80,20'";
    let weighted = folder.recipe(256, weighted);
    assert_ne!(open(&weighted).unwrap().fingerprint(), files.fingerprint());
    let written = toml::to_string(&weighted).unwrap();
    assert_eq!(crate::recipe::parsed(&written).unwrap(), weighted);
}

#[test]
fn special_tokens_follow_the_tokenizer_and_the_setting() {
    let folder = Folder::new();
    let tokenizer = BPE.replace("byte_bpe", "byte_fallback");
    let with = |more: &str| {
        let data = format!("path = 'DIR/text.txt'\ntokenizer = '{tokenizer}'\n{more}");
        folder.recipe(1000, &data)
    };
    for (more, each, special) in [
        ("", "each document begins with <s>", true),
        (
            "special_tokens = true",
            "each document begins with <s>",
            true,
        ),
        (
            "special_tokens = false",
            "no document begins with <s>",
            false,
        ),
    ] {
        let recipe = with(more);
        let data = open(&recipe).unwrap();
        assert!(data.describe().ends_with(each), "{}", data.describe());
        let config = crate::resume_check::config(&recipe, &*data).unwrap();
        assert_eq!(config["data_special_tokens"], special);
        let own = super::tokenizer(&recipe).unwrap();
        let sample = sample(&recipe, &*data, own.as_ref()).unwrap();
        let prompt = sample.prompt_tokens(&own.unwrap()).unwrap();
        assert_eq!(prompt[0] == 1, special);
    }
    let wrong = |data: &str| error(&folder.recipe(256, &format!("{data}\nspecial_tokens = true")));
    assert!(wrong("path = 'DIR/text.txt'").contains("no effect on bytes"));
    let files = wrong("files = ['DIR/tokens']\nsplit = '90,10'");
    assert!(
        files.starts_with("data.special_tokens requires text, but the data is token files"),
        "{files}"
    );
}

#[test]
fn everything_can_be_trained_on() {
    let folder = Folder::new();
    fs::write(folder.path("short.txt"), "the dog and the fox ".repeat(3)).unwrap();
    for (vocabulary, tokenizer) in [(256, "bytes"), (400, "BPE")] {
        let data = format!("path = 'DIR/short.txt'\ntokenizer = '{tokenizer}'");
        let mut recipe = folder.recipe(vocabulary, &format!("{data}\nsplit = '100,0,0'"));
        let all = open(&recipe).unwrap();
        assert!(
            all.describe().contains("to train on, 0 held out"),
            "{}",
            all.describe()
        );
        assert!(all.held_out(8, 4).unwrap().is_empty());
        let own = super::tokenizer(&recipe).unwrap();
        assert_eq!(
            sample(&recipe, &*all, own.as_ref()).unwrap().prompt,
            recipe.sample.prompt
        );
        // A tenth of such a short text is too short for an evaluation.
        recipe = folder.recipe(vocabulary, &data);
        assert!(error(&recipe).contains("held"), "{}", error(&recipe));
        recipe.train.held_out_samples = 0;
        recipe.sample.prompt.clear();
        let data = open(&recipe).unwrap();
        sample(&recipe, &*data, own.as_ref()).unwrap();
    }
    let files = folder.recipe(256, "files = ['DIR/tokens']\nsplit = '100,0,0'");
    assert!(open(&files).unwrap().held_out(8, 4).unwrap().is_empty());
    let text = error(&folder.recipe(256, "path = 'DIR/text.txt'\nsplit = '90,10,0'"));
    assert!(text.ends_with("\"100,0,0\" holds nothing out"), "{text}");
    let chat = "split = '100,0,0'\nchat = { files = ['DIR/text.txt'] }";
    let chat = error(&folder.recipe(256, chat));
    assert!(
        chat.ends_with("or set data.chat.held_out (0 holds nothing out)"),
        "{chat}"
    );
}

#[test]
fn records_are_documents_under_a_key() {
    let folder = Folder::new();
    let lines = |key: &str| -> String {
        let line = |i| format!("{{\"id\": {i}, \"{key}\": \"the dog number {i}\\n\"}}\n");
        (0..40).map(line).collect()
    };
    fs::write(folder.path("a.jsonl"), lines("text")).unwrap();
    fs::write(folder.path("b.ndjson"), lines("body")).unwrap();
    let text = open(&folder.recipe(256, "path = 'DIR/a.jsonl'")).unwrap();
    let body = open(&folder.recipe(256, "path = 'DIR/b.ndjson'\njson_key = 'body'")).unwrap();
    assert_eq!(text.fingerprint(), body.fingerprint());
    // 10 documents have 17 bytes and 30 have 18 bytes. Four documents of 17 bytes are held out. One byte separates
    // two documents.
    let described = text.describe();
    assert!(
        described.contains("a.jsonl: 677 bytes to train on, 71 held out"),
        "{described}"
    );
    let error = error(&folder.recipe(256, "path = 'DIR/b.ndjson'"));
    assert!(
        error.ends_with("b.ndjson:1: the object has no `text`, but `id`, `body` (see --json-key)"),
        "{error}"
    );
    let folder_of_both = "path = 'DIR'\nextensions = ['jsonl', 'txt']";
    let both = open(&folder.recipe(256, folder_of_both))
        .unwrap()
        .describe();
    assert!(both.contains(", 2 files read, 3 left out ("), "{both}");
    assert!(both.contains("(.bin 1, .idx 1, .ndjson 1)"), "{both}");
}

#[test]
fn what_stands_beside_token_files_is_heeded() {
    let folder = Folder::new();
    let bpe = Tokenizer::open(BPE.as_ref()).unwrap();
    folder.describe(&bpe);
    let files = "files = ['DIR/tokens']\nsplit = '90,10'";
    let recipe = folder.recipe(400, files);
    let data = open(&recipe).unwrap();
    assert_eq!((data.vocabulary(), data.bytes_per_token()), (400, 2.5));
    assert_eq!(unit(&*data), LossUnit::TokenOfBytes);
    let found = tokenizer(&recipe).unwrap().unwrap();
    assert_eq!(found.fingerprint(), bpe.fingerprint());
    let error = error(&folder.recipe(399, files));
    assert_snapshot!(
        error,
        @"invalid model.vocabulary = 399: expected at least 400, because the tokens of the data are below 400"
    );
    let other = folder.recipe(400, &format!("{files}\ntokenizer = 'bytes'"));
    let error = self::error(&other);
    assert!(error.contains("= bytes is not the tokenizer of"), "{error}");
    assert!(error.contains("expected"), "{error}");
    // A missing tokenizer is not an error, because the tokens are available.
    let mut gone = TokenFileInfo::read(&folder.path("tokens"))
        .unwrap()
        .unwrap();
    gone.tokenizer_path = Some("/nowhere".into());
    gone.write(&folder.path("tokens")).unwrap();
    assert!(tokenizer(&recipe).unwrap().is_none());
    assert!(open(&recipe).is_ok());
}

/// Tests that `generate` can read a checkpoint without the data.
#[test]
fn a_checkpoint_names_the_tokenizer_of_its_token_files() {
    let folder = Folder::new();
    let named = |recipe: &Recipe| {
        let data = open(recipe).unwrap();
        crate::resume_check::config(recipe, &*data).unwrap()["data"]["tokenizer"].clone()
    };
    let recipe = folder.recipe(400, "files = ['DIR/tokens']\nsplit = '90,10'");
    assert!(named(&recipe).is_null(), "nobody knows it");
    folder.describe(&Tokenizer::open(BPE.as_ref()).unwrap());
    assert_eq!(named(&recipe), BPE);
    let mut text = folder.recipe(400, "path = 'DIR/text.txt'\ntokenizer = 'BPE'");
    assert_eq!(named(&text), BPE);
    // The recorded path works from any folder.
    text.data.tokenizer = Some("../burn-megatron-data/tests/fixtures/tokenizer/byte_bpe".into());
    assert_eq!(named(&text), BPE);
}

#[test]
fn the_text_at_the_end_needs_a_tokenizer() {
    let folder = Folder::new();
    let files = "files = ['DIR/tokens']\nsplit = '90,10'";
    let of = |recipe: &Recipe| sample_tokenizer(recipe).map_err(|error| error.to_string());
    let mut unknown = folder.recipe(400, files);
    assert!(unknown.sample.tokens > 0);
    let error = of(&unknown).unwrap_err();
    assert!(
        error.contains("set data.tokenizer (--tokenizer), or set sample.tokens to 0"),
        "{error}"
    );
    unknown.sample.tokens = 0;
    assert!(of(&unknown).unwrap().is_none());
    let bpe = Tokenizer::open(BPE.as_ref()).unwrap();
    let is_bpe = |recipe: &Recipe| {
        let found = of(recipe).unwrap().unwrap();
        assert_eq!(found.fingerprint(), bpe.fingerprint());
    };
    is_bpe(&folder.recipe(400, &format!("{files}\ntokenizer = 'BPE'")));
    is_bpe(&folder.recipe(400, "path = 'DIR/text.txt'\ntokenizer = 'BPE'"));
    let small = folder.recipe(399, &format!("{files}\ntokenizer = 'BPE'"));
    let error = of(&small).unwrap_err();
    assert!(error.contains("= 399: expected at least 400"), "{error}");
    let bytes = of(&folder.recipe(256, "path = 'DIR/text.txt'")).unwrap();
    assert!(bytes.unwrap().is_bytes());
    folder.describe(&bpe);
    is_bpe(&folder.recipe(400, files));
}

#[test]
fn settings_that_do_nothing_or_do_not_fit_are_errors() {
    let folder = Folder::new();
    for (data, wanted) in [
        (
            "split = '1,1'",
            "data.split (--data.split) requires token files",
        ),
        ("packing = true", "data.packing requires token files"),
        (
            "cache = 'x'",
            "data.cache (--data.cache) requires token files",
        ),
        (
            "path = 'x'\nfiles = ['y']",
            "conflicts with data.files (tokens)",
        ),
        ("files = ['DIR/none']", "there is no"),
        ("files = ['DIR/tokens']\nsplit = '1,x'", "1,x"),
        (
            "json_key = 'a'\nfiles = ['DIR/tokens']",
            "data.json_key (--json-key) requires text, but the data is token files",
        ),
        (
            "json_key = 'a'\npath = 'DIR/text.txt'",
            "data.json_key (--json-key) = a requires JSON lines",
        ),
        (
            "tokenizer = 'DIR'\npath = 'DIR/text.txt'",
            "no tokenizer at",
        ),
    ] {
        let error = error(&folder.recipe(256, data));
        assert!(error.contains(wanted), "{data}: {error}");
    }
    let error = error(&folder.recipe(300, "path = 'DIR/text.txt'"));
    let fits = "invalid model.vocabulary = 300: expected 256 for bytes";
    assert!(error.starts_with(fits), "{error}");
    // The vocabulary of the token files is unknown, so token ids are checked against the vocabulary of the model.
    let error = self::error(&folder.recipe(100, "files = ['DIR/tokens']\nsplit = '90,10'"));
    assert!(error.contains("100"), "{error}");
    let error = toml::from_str::<DataConfig>("files = [{prefix = 'x', share = 1}]").unwrap_err();
    assert!(error.to_string().contains("files"), "{error}");
}

#[test]
fn flags_take_the_place_of_the_table() {
    let folder = Folder::new();
    let apply = |data: &DataConfig, flag: &str| {
        let mut data = data.clone();
        data.read_from(&folder.path(flag), false);
        data
    };
    let text = DataConfig {
        path: Some("elsewhere".into()),
        tokenizer: Some("x".into()),
        ..DataConfig::default()
    };
    for flag in ["tokens", "tokens.bin", "tokens.idx"] {
        let files = apply(&text, flag);
        assert_eq!((files.path, files.tokenizer), (None, None), "{flag}");
        assert_eq!(
            files.files,
            [TokenFileEntry::Prefix(folder.path("tokens"))],
            "{flag}"
        );
    }
    let files = DataConfig {
        files: vec![TokenFileEntry::Weighted(WeightedTokenFiles {
            prefix: "elsewhere".into(),
            weight: 1.0,
        })],
        packing: true,
        ..DataConfig::default()
    };
    let text_again = apply(&files, "text.txt");
    assert_eq!(text_again.path, Some(folder.path("text.txt")));
    assert!(text_again.files.is_empty() && text_again.check().is_ok());
    assert!(apply(&files, "tokens").packing);
    fs::write(folder.path("chat.jsonl"), "{\"messages\": []}").unwrap();
    fs::write(folder.path("text.jsonl"), "{\"text\": \"a\"}").unwrap();
    assert!(apply(&text, "chat.jsonl").chat.is_some());
    assert_eq!(
        apply(&text, "text.jsonl").path,
        Some(folder.path("text.jsonl"))
    );
    let mut as_text = text.clone();
    as_text.read_from(&folder.path("chat.jsonl"), true);
    assert!(as_text.chat.is_none());
    as_text.json_key = Some("messages".into());
    assert_eq!(apply(&as_text, "text.jsonl").json_key, as_text.json_key);
    assert_eq!(apply(&as_text, "tokens").json_key, None);
    let kept = apply(&text, "text.txt");
    assert_eq!(kept.tokenizer.as_deref(), Some("x"));
}

#[test]
fn places_are_forgotten_and_weights_are_not() {
    let of = |prefix: &str, weight| {
        let mut data = DataConfig {
            files: vec![TokenFileEntry::Weighted(WeightedTokenFiles {
                prefix: prefix.into(),
                weight,
            })],
            cache: Some(prefix.into()),
            ..DataConfig::default()
        };
        data.clear_paths();
        data
    };
    assert_eq!(of("a", 1.0), of("b", 1.0));
    assert_ne!(of("a", 1.0), of("a", 2.0));
}

#[test]
fn losses_are_shown_in_their_unit() {
    assert_snapshot!(LossUnit::Byte.show(1.449, 2.0905), @"1.4490 nats per byte (2.0905 bits)");
    assert_snapshot!(LossUnit::Token.show(2.0, 2.8854), @"2.0000 nats per token (2.8854 bits)");
    let known = LossUnit::TokenOfBytes.show(2.0, 1.1542);
    assert_snapshot!(known, @"2.0000 nats per token (1.1542 bits per byte)");
}
