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

/// Runs `convert` with these flags.
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
    convert(&format!("{} {checkpoint}", source.display())).unwrap();
    convert(&format!("{checkpoint} {back} --max-shard-size 30KB")).unwrap();
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
    let error = refusal(format!("{checkpoint} {back}"));
    let there = "exists already: name another folder, or replace this one with --overwrite";
    assert_eq!(error, format!("{back} {there}"));
    convert(&format!("{checkpoint} {back} --overwrite")).unwrap();
    assert_eq!(HfFolder::open(&back).unwrap().keys(), a.keys());
    assert!(
        !Path::new(&back)
            .join("model.safetensors.index.json")
            .exists()
    );
    convert(&format!("{back} {checkpoint} --overwrite")).unwrap();
    let own = at("own");
    fs::create_dir_all(Path::new(&own).join("data")).unwrap();
    let error = refusal(format!("{checkpoint} {own} --overwrite"));
    assert!(error.contains("is neither that nor empty"), "{error}");
    let error = refusal(format!(
        "{checkpoint}/step-00000000 {checkpoint} --overwrite"
    ));
    assert!(error.contains("contain each other"), "{error}");
    let names = fs::read_dir(&folder).unwrap().count();
    assert_eq!(names, 3, "nothing is left of what was replaced");
    let error = refusal(format!("{back} {} --dtype bf16", at("x")));
    let wanted =
        format!("--dtype requires a checkpoint, but {back} is a Hugging Face folder: remove it");
    assert_eq!(error, wanted);
    let error = refusal(format!("{} {}", at("none"), at("x")));
    let wanted = format!(
        "there is no model folder at {}: expected a checkpoint",
        at("none")
    );
    assert!(error.starts_with(&wanted), "{error}");
    fs::remove_dir_all(folder).unwrap();
}

/// User-defined family with the files of Llama under another name.
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
    let convert = |from: &Path, to: &Path, families: &Families| {
        let flags = format!("{} {}", from.display(), to.display());
        run(&parse_text(&flags)?, families)
    };
    convert(&source, &checkpoint, &families).unwrap();
    convert(&checkpoint, &back, &families).unwrap();
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

    let refusal = |from: &Path, families: &Families| {
        let error = convert(from, &folder.join("x"), families).unwrap_err();
        error.to_string()
    };
    let error = refusal(&source, &Families::transformers());
    let wanted = "unknown model_type = \"mine\": expected gpt2, llama, mistral, qwen2, qwen3, \
                  mixtral, qwen3_moe, olmoe, gemma2, gemma3_text, deepseek_v2, deepseek_v3 or gpt_oss";
    assert!(error.ends_with(wanted), "{error}");
    let mut families = Families::none();
    families.add("mine", TransformerConfig::llama());
    let error = refusal(&source, &families);
    assert!(
        error.ends_with("this command has no family of Hugging Face"),
        "{error}"
    );
    let error = refusal(&checkpoint, &families);
    assert!(
        error.ends_with("the family \"mine\" is not a Hugging Face family"),
        "{error}"
    );
    fs::remove_dir_all(folder).unwrap();
}
