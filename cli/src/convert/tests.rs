use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::TensorSlice;
use burn_megatron_models::TransformerConfig;
use burn_megatron_models::hf::{
    ConfigKeys, HfConfigError, HfFamily, HfFolder, HfNames, ModelFamily, WeightMapping,
};
use serde_json::{Map, Value};

use super::*;
use crate::flags::parse_text;

/// The flags as they are typed.
fn convert(flags: &str) -> Result<ExitCode, Error> {
    run(&parse_text(flags)?, &Families::transformers())
}

fn fixture(name: &str) -> PathBuf {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/hf");
    Path::new(fixtures).join(name)
}

#[test]
fn there_and_back() {
    let folder = std::env::temp_dir().join(format!("convert-{}", std::process::id()));
    let at = |name: &str| folder.join(name).display().to_string();
    let (source, checkpoint, back) = (fixture("llama3"), at("checkpoint"), at("back"));
    convert(&format!("--from hf {} --to {checkpoint}", source.display())).unwrap();
    convert(&format!(
        "--from checkpoint {checkpoint} --to {back} --max-shard-size 30KB"
    ))
    .unwrap();
    let (a, b) = (
        HfFolder::open(&source).unwrap(),
        HfFolder::open(&back).unwrap(),
    );
    assert_eq!(a.config(), b.config());
    for key in a.keys() {
        let slice = TensorSlice::whole(&a.tensor(&key).unwrap().shape);
        assert_eq!(a.read(&key, &slice).unwrap(), b.read(&key, &slice).unwrap());
    }
    assert!(
        Path::new(&back)
            .join("model.safetensors.index.json")
            .is_file()
    );
    let refusal = |flags: String| convert(&flags).unwrap_err().to_string();
    let error = refusal(format!("--from checkpoint {checkpoint} --to {back}"));
    assert!(
        error.starts_with("cannot write") && error.contains("back"),
        "{error}"
    );
    let error = refusal(format!("--from hf {} --to {checkpoint}", source.display()));
    assert!(
        error.starts_with("cannot write") && error.contains("checkpoint"),
        "{error}"
    );
    let error = refusal(format!("--from hf {back} --to {} --dtype bf16", at("x")));
    assert_eq!(error, "--dtype applies to --from checkpoint only");
    let error = refusal(format!("--from gguf {back} --to {}", at("x")));
    assert_eq!(error, "invalid --from gguf: expected hf or checkpoint");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn sizes_have_units() {
    let sizes = ["7", "7B", "2KB", "3MB", "5GB"].map(|text| bytes(text).unwrap());
    assert_eq!(sizes, [7, 7, 2_000, 3_000_000, 5_000_000_000]);
    for text in ["", "GB", "0", "-1MB", "1.5GB", "1TB", "99999999999999GB"] {
        bytes(text).unwrap_err();
    }
}

/// A family of a user, with the files of Llama under another name.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mine;

impl HfFamily for Mine {
    type Model = TransformerConfig;

    const ALL: &'static [Self] = &[Mine];

    fn names(self) -> HfNames {
        HfNames {
            model_type: "mine",
            architecture: "MineForCausalLM",
            ..ModelFamily::Llama.names()
        }
    }

    fn of_model(_: &TransformerConfig) -> Self {
        Mine
    }

    fn read(self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        ModelFamily::Llama.read(keys)
    }

    fn write(self, model: &TransformerConfig) -> Map<String, Value> {
        ModelFamily::Llama.write(model)
    }

    fn tensors(self, model: &TransformerConfig) -> Vec<WeightMapping> {
        ModelFamily::Llama.tensors(model)
    }
}

#[test]
fn a_family_of_a_user_is_converted_too() {
    let folder = std::env::temp_dir().join(format!("convert-mine-{}", std::process::id()));
    let [source, checkpoint, back] = ["source", "checkpoint", "back"].map(|name| folder.join(name));
    fs::create_dir_all(&source).unwrap();
    let weights = "model.safetensors";
    fs::copy(fixture("llama2").join(weights), source.join(weights)).unwrap();
    let config = fs::read_to_string(fixture("llama2").join("config.json")).unwrap();
    let config = config
        .replace("\"llama\"", "\"mine\"")
        .replace("Llama", "Mine");
    fs::write(source.join("config.json"), config).unwrap();

    let mut families = Families::transformers();
    families.add_hf(Mine, TransformerConfig::llama());
    let convert = |kind: &str, from: &Path, to: &Path, families: &Families| {
        let (from, to) = (from.display(), to.display());
        run(
            &parse_text(&format!("--from {kind} {from} --to {to}"))?,
            families,
        )
    };
    convert("hf", &source, &checkpoint, &families).unwrap();
    convert("checkpoint", &checkpoint, &back, &families).unwrap();
    let opened = [&source, &checkpoint, &back].map(|path| families.open(path).unwrap());
    let (model, weights) = &opened[0];
    assert_eq!(model.family(), "mine");
    for (other, source) in &opened[1..] {
        assert_eq!((other, source.keys()), (model, weights.keys()));
        for key in weights.keys() {
            let whole = TensorSlice::whole(&weights.tensor(&key).unwrap().shape);
            assert_eq!(
                source.read(&key, &whole).unwrap(),
                weights.read(&key, &whole).unwrap()
            );
        }
    }

    let refusal = |kind: &str, from: &Path, families: &Families| {
        let error = convert(kind, from, &folder.join("x"), families).unwrap_err();
        error.to_string()
    };
    let error = refusal("hf", &source, &Families::transformers());
    let wanted = "unknown model_type = \"mine\": expected gpt2, llama, mistral, qwen2, qwen3, \
                  mixtral, qwen3_moe, olmoe, gemma2, gemma3_text, deepseek_v2, deepseek_v3 or gpt_oss";
    assert!(error.ends_with(wanted), "{error}");
    let mut families = Families::none();
    families.add("mine", TransformerConfig::llama());
    let error = refusal("hf", &source, &families);
    assert!(
        error.ends_with("this command has no family of Hugging Face"),
        "{error}"
    );
    let error = refusal("checkpoint", &checkpoint, &families);
    assert!(
        error.ends_with("the family \"mine\" is not one of Hugging Face"),
        "{error}"
    );
    fs::remove_dir_all(folder).unwrap();
}
