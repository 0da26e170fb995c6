use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use burn::tensor::DType;
use burn_megatron::checkpoint::{
    CheckpointFolder, CheckpointMetadata, ElementType, Retention, TensorMeta, TensorShard,
    TensorSlice,
};
use burn_megatron::kernels::philox::{Stream, uniform};
use burn_megatron::model::ModelConfig;
use burn_megatron_models::TransformerConfig;
use burn_megatron_models::hf::{self, HfFolder};
use insta::assert_snapshot;

use super::*;
use crate::family::{Families, Model};
use crate::flags::parse;

/// Folder of one test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("generate-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    /// Saves a byte-level model with random weights as the only checkpoint of a run.
    fn save(&self, config: &TransformerConfig, recipe: serde_json::Value) -> &Path {
        let scope = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 1, DType::F32);
        let table = config.init_with(scope).unwrap().table;
        let piece = |shape: &Vec<usize>, path: &str| TensorShard {
            tensor: TensorMeta {
                key: format!("model/{path}"),
                dtype: ElementType::F32,
                shape: shape.clone(),
            },
            slice: TensorSlice::whole(shape),
        };
        let entries = table.entries().iter();
        let pieces: Vec<_> = entries
            .map(|entry| piece(&entry.shape, &entry.path))
            .collect();
        let draft = CheckpointFolder::create(self.0.join("checkpoints")).unwrap();
        let draft = draft.begin(3).unwrap();
        let write = |index: usize| {
            let mut bytes = vec![];
            let len = pieces[index].slice.len();
            Stream::new(5, index as u64).words(0, len, |_, word| {
                bytes.extend((uniform(word) as f32 - 0.5).to_le_bytes());
            });
            Ok(bytes)
        };
        draft.write_part(0, &pieces, &[], write).unwrap();
        let about = CheckpointMetadata {
            step: 3,
            samples: 0,
            layout: "one".into(),
            config: recipe,
            state: serde_json::Value::Null,
        };
        let deadline = Duration::from_secs(20);
        draft
            .publish(1, &about, &Retention::default(), deadline)
            .unwrap();
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn small() -> TransformerConfig {
    TransformerConfig {
        context: 24,
        hidden: 16,
        layers: 2,
        heads: 4,
        ..TransformerConfig::llama()
    }
}

/// Generates a single text on rank 0.
fn generate(model: &Path, flags: &str) -> Result<GenerationOutput, Error> {
    Ok(generate_all(model, flags)?.1.swap_remove(0))
}

/// Generates with these flags. Returns the prompts and the outputs of rank 0.
fn generate_all(model: &Path, flags: &str) -> Result<(Vec<String>, Vec<GenerationOutput>), Error> {
    let path = model.display().to_string();
    let model = ["--model", &path];
    let flags: Vec<_> = model.into_iter().chain(flags.split_whitespace()).collect();
    let args: GenerateArgs = parse(&flags)?;
    let (config, prompts) = (args.config()?, args.prompts()?);
    let saved = SavedModel::open(
        &args.model,
        args.tokenizer.as_deref(),
        &Families::transformers(),
    )?;
    let run = GenerationRun::new(&args, &config, &prompts, &saved)?;
    let ranks = args.tensor_parallel * args.pipeline_parallel;
    let world = ranks::set_up(&args.ranks, &args.nccl.0, args.device, ranks)?.world;
    let shown = Mutex::new(String::new());
    let show = |text: &str| {
        shown.lock().unwrap().push_str(text);
        Ok(())
    };
    let written = world.run(|rank| run.write(&rank, &Device::flex(), &show))?;
    let written = written.into_iter().next().flatten().unwrap().generated;
    let whole = if args.is_json() {
        String::new()
    } else {
        format!("{}{}\n", prompts[0], written[0].text)
    };
    assert_eq!(shown.into_inner().unwrap(), whole);
    Ok((prompts, written))
}

#[test]
fn several_prompts_are_written_as_json_lines() {
    let folder = Folder::new("several");
    let run = folder.save(&small(), serde_json::json!({ "model": small() }));
    let flags = "--max-tokens 12 --seed 4 --logprobs";
    let alone = ["pub", "f", "struct"].map(|prompt| {
        let flags = format!("--prompt {prompt} {flags} --batch-size 1");
        generate(run, &flags).unwrap()
    });
    let texts = |texts: &[GenerationOutput]| -> Vec<_> {
        let of = |text: &GenerationOutput| (text.tokens.clone(), text.logprobs.clone());
        texts.iter().map(of).collect()
    };
    let file = |name: &str, content: &str| {
        let path = folder.0.join(name);
        fs::write(&path, content).unwrap();
        format!("--prompts {}", path.display())
    };
    let lines =
        "{\"prompt\": \"pub\"}\n{\"prompt\": \"f\", \"id\": 3}\n\n{\"prompt\": \"struct\"}\n";
    for (given, more) in [
        ("--prompt pub --prompt f --prompt struct".into(), ""),
        (file("prompts", "pub\nf\nstruct\n"), "--batch-size 2"),
        (file("prompts.jsonl", lines), "--pp 2"),
    ] {
        let (prompts, found) = generate_all(run, &format!("{given} {flags} {more}")).unwrap();
        assert_eq!(prompts, ["pub", "f", "struct"]);
        assert_eq!(texts(&found), texts(&alone), "{given}");
        let written = json_lines(&prompts, 1, &found).unwrap();
        let lines: Vec<serde_json::Value> = written
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        for ((line, prompt), text) in lines.iter().zip(&prompts).zip(&alone) {
            assert_eq!(line["prompt"], *prompt);
            assert_eq!(line["text"], text.text);
            assert_eq!(line["finish_reason"], "length");
            let logprobs: Vec<f64> = serde_json::from_value(line["logprobs"].clone()).unwrap();
            assert_eq!(logprobs.len(), 12);
            for (found, expected) in logprobs.iter().zip(&text.logprobs) {
                assert!((found - expected).abs() < 1e-12);
            }
        }
    }
    // Several samples per prompt. The first sample is the text above.
    let (prompts, found) =
        generate_all(run, &format!("--prompt pub --prompt f {flags} --samples 3")).unwrap();
    assert_eq!(
        [&found[0].tokens, &found[3].tokens],
        [&alone[0].tokens, &alone[1].tokens]
    );
    assert!(found[0].tokens != found[1].tokens && found[1].tokens != found[2].tokens);
    let written = json_lines(&prompts, 3, &found).unwrap();
    let lines: Vec<serde_json::Value> = written
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for (number, line) in lines.iter().enumerate() {
        assert_eq!(
            (&line["prompt"], &line["sample"]),
            (&["pub", "f"][number / 3].into(), &(number % 3).into())
        );
    }
    assert_eq!(lines.len(), 6);
    let error = |flags: &str| generate(run, flags).unwrap_err().to_string();
    assert!(
        error("--prompt a --samples 0").starts_with("invalid samples = 0: expected 1 to 65536")
    );
    assert!(
        error("--prompt a --samples 2 --temperature 0")
            .starts_with("samples = 2 conflicts with temperature = 0")
    );
    let invalid = error(&file("bad.jsonl", "{\"prompt\": \"a\"}\n{\"text\": 1}\n"));
    assert!(invalid.starts_with("invalid line 2 of "), "{invalid}");
    assert!(invalid.contains("missing field `prompt`"), "{invalid}");
    assert!(error(&file("none", "")).ends_with("has no prompts: expected one in each line"));
    assert!(error("--prompt a --batch-size 0").starts_with("invalid batch-size = 0"));
    assert!(error("--prompts /nowhere/x").starts_with("cannot read the prompts /nowhere/x"));
}

#[test]
fn a_checkpoint_writes_the_same_in_every_layout() {
    let folder = Folder::new("layouts");
    let run = folder.save(&small(), serde_json::json!({ "model": small() }));
    let flags = "--prompt pub --max-tokens 40 --top-k 50 --seed 4";
    let one = generate(run, flags).unwrap();
    assert_eq!((one.tokens.len(), one.prompt), (40, 3));
    assert_ne!(
        generate(run, "--prompt pub --max-tokens 40 --seed 5")
            .unwrap()
            .text,
        one.text
    );
    let checkpoint = run.join("checkpoints/step-00000003");
    for (path, more) in [
        (run, "--tp 2"),
        (run, "--pp 2"),
        (run, "--tp 2 --pp 2"),
        (run, "--no-cache"),
        (&run.join("checkpoints"), "--tokenizer bytes"),
        (&checkpoint, "--kernels unfused"),
    ] {
        let other = generate(path, &format!("{flags} {more}")).unwrap();
        assert_eq!(other.text, one.text, "{more}");
    }
    let file = folder.0.join("prompt");
    fs::write(&file, "pub").unwrap();
    let flags = format!(
        "--prompt-file {} --max-tokens 40 --top-k 50 --seed 4",
        file.display()
    );
    assert_eq!(generate(run, &flags).unwrap().text, one.text);
}

#[test]
fn what_does_not_fit_is_named() {
    let folder = Folder::new("errors");
    let other = TransformerConfig {
        vocabulary: 300,
        ..small()
    };
    let run = folder.save(&other, serde_json::json!({ "model": other }));
    let error = |flags: &str| generate(run, flags).unwrap_err().to_string();
    assert!(
        error("--prompt a")
            .ends_with("does not name the tokenizer of its 300 tokens; give --tokenizer"),
        "{}",
        error("--prompt a")
    );
    generate(run, "--prompt a --max-tokens 2 --tokenizer bytes").unwrap();
    assert!(error("--prompt a --top-p 2").starts_with("invalid top_p = 2"));
    assert!(error("--prompt a --tokenizer bytes --tp 3").starts_with("heads 4 cannot be split"));
    assert!(error("--prompt a --tokenizer bytes --tp 0").starts_with("invalid tensor = 0"));
    assert!(
        error("--prompt-file /nowhere/at/all")
            .starts_with("cannot read the prompt /nowhere/at/all")
    );
    let small = TransformerConfig {
        vocabulary: 100,
        ..small()
    };
    let folder = Folder::new("smaller");
    let run = folder.save(&small, serde_json::json!({ "model": small }));
    let error = generate(run, "--prompt a --tokenizer bytes").unwrap_err();
    assert_snapshot!(
        error,
        @"the tokenizer bytes has 256 tokens, more than the 100 tokens of the model: expected the tokenizer of the model"
    );
}

/// Creates a Hugging Face folder with a tokenizer whose tokens are letters. The tokenizer adds special tokens to each
/// text.
fn with_tokenizer(folder: &Folder) -> PathBuf {
    let fixture = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/tests/fixtures/hf/llama2"
    );
    let own = folder.0.join("hf");
    fs::create_dir_all(&own).unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(Path::new(fixture).join(name), own.join(name)).unwrap();
    }
    let mut vocabulary = serde_json::json!({ "<unk>": 0, "<s>": 1, "</s>": 2 });
    for (id, letter) in ('A'..='Z').chain('a'..='z').enumerate() {
        vocabulary[letter.to_string()] = (id + 3).into();
    }
    let special = |id: usize, content: &str| {
        serde_json::json!({
            "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false,
        })
    };
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "pre_tokenizer": {
            "type": "Split", "pattern": { "Regex": "." }, "behavior": "Isolated", "invert": false,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                { "SpecialToken": { "id": "<s>", "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } },
            ],
            "pair": [
                { "Sequence": { "id": "A", "type_id": 0 } },
                { "Sequence": { "id": "B", "type_id": 0 } },
            ],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
        },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>" },
    });
    fs::write(own.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    own
}

#[test]
fn a_converted_checkpoint_writes_as_its_folder_does() {
    let folder = Folder::new("converted");
    let (hf, checkpoint) = (with_tokenizer(&folder), folder.0.join("checkpoint"));
    let source = HfFolder::open(&hf).unwrap();
    hf::import(&source, &checkpoint, &mut |_| {}).unwrap();
    let flags = "--prompt hello --max-tokens 20 --temperature 1 --seed 3";
    let own = generate(&hf, flags).unwrap();
    // One special token precedes the five letters.
    assert_eq!(own.prompt, 6);
    assert!(own.tokens.len() > 5, "{:?}", own.tokens);
    for more in ["", "--tp 2", "--pp 2"] {
        let other = generate(&checkpoint, &format!("{flags} {more}")).unwrap();
        assert_eq!(
            (other.tokens, other.text),
            (own.tokens.clone(), own.text.clone())
        );
        assert_eq!(other.prompt, 6);
    }
    // Another tokenizer changes only the tokenization.
    let tokenizer = folder.0.join("other");
    fs::create_dir_all(&tokenizer).unwrap();
    fs::copy(hf.join("tokenizer.json"), tokenizer.join("tokenizer.json")).unwrap();
    let flags = format!("{flags} --tokenizer {}", tokenizer.display());
    let [own, other] = [&hf, &checkpoint].map(|path| generate(path, &flags).unwrap());
    assert_eq!((other.tokens, other.prompt), (own.tokens, 6));
    // A prompt gets special tokens if the documents of the run had them.
    let model = serde_json::to_value(Model::transformer(source.config().model.clone())).unwrap();
    for (special_tokens, prompt) in [(true, 6), (false, 5)] {
        let run = Folder::new(&format!("documents-{special_tokens}"));
        let config = serde_json::json!({ "model": &model, "data_special_tokens": special_tokens });
        let path = run.save(&source.config().model, config);
        assert_eq!(generate(path, &flags).unwrap().prompt, prompt);
    }
}

#[test]
fn figures_say_how_fast_it_was() {
    let written = GenerationResult {
        generated: vec![GenerationOutput {
            text: String::new(),
            tokens: vec![0; 11],
            logprobs: vec![],
            finish_reason: FinishReason::Stop,
            prompt: 30,
            drafted: 0,
            accepted: 0,
            prefill: Duration::from_millis(100),
            decode: Duration::from_millis(500),
        }],
        time: Duration::from_millis(600),
        cache_bytes: 1_230_000,
    };
    assert_snapshot!(written.summary(), @"
    prefill  30 tokens in 0.100 s, 300.0 per second
    decode   10 tokens in 0.500 s, 20.0 per second; 1.17 MiB of cache on rank 0
    end      a stop text (--stop)
    ");
}
