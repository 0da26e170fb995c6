//! The files of an exported model that are copied from other sources: its `config.json`, the tokenizer and the chat
//! template.

use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::{Checkpoint, TensorSource};
use burn_megatron::nn::lora::LoraConfig;
use burn_megatron_data::tokenizer::{BYTES, Tokenizer};
use burn_megatron_models::hf::peft::{adapted_model, is_peft_folder};
use burn_megatron_models::hf::{SpecialTokenIds, companion_files, is_hf_folder, stored_hf_files};
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::model_folder::open_checkpoint;

/// The file of a tokenizer in a Hugging Face folder.
const TOKENIZER: &str = "tokenizer.json";
const TEMPLATE: &str = "chat_template.jinja";

/// The files that belong to a tokenizer, if the recipe names the tokenizer file instead of its folder.
const SMALL_FILES: [&str; 4] = [
    TEMPLATE,
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
];

/// The maximum length of a chain of runs that were loaded from each other.
const MAX_RUNS: usize = 64;

/// Names and contents of files.
type Files = Vec<(String, Vec<u8>)>;

/// The sources of the files next to the weights of an exported model.
#[derive(Clone, Debug, Default)]
pub struct Companions {
    origin: Option<Origin>,
    tokenizer: Option<TokenizerFiles>,
    template: Option<Vec<u8>>,
}

/// A Hugging Face folder, or a checkpoint that was converted from one.
#[derive(Clone, Debug)]
pub enum Origin {
    /// The folder of `--like`, which must have the same model.
    Like(PathBuf),
    /// The model that the run was loaded from.
    Loaded(PathBuf),
}

/// The tokenizer of the data.
#[derive(Clone, Debug)]
struct TokenizerFiles {
    files: Files,
    tokens: SpecialTokenIds,
}

impl Companions {
    /// Takes everything from a Hugging Face folder.
    pub fn like(folder: &Path) -> Self {
        Self {
            origin: Some(Origin::Like(folder.into())),
            ..Self::default()
        }
    }

    /// Returns the companions of a checkpoint of a run. These are the files of the model that the run was loaded
    /// from, and the tokenizer and the chat template of its data. For a checkpoint that was converted from a Hugging
    /// Face folder, the result is empty, because the checkpoint stores these files.
    ///
    /// # Errors
    /// Returns an error if a file of the recipe cannot be read.
    pub fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self, Error> {
        if !stored_hf_files(checkpoint)?.is_empty() {
            return Ok(Self::default());
        }
        let tokenizer = checkpoint.metadata().config["data"]["tokenizer"].as_str();
        let found = Self::of_recipe(&checkpoint.metadata().config, tokenizer);
        found.map_err(|error| {
            let name = checkpoint.name();
            format!("{name}: {error}; --like DIR takes these files from a Hugging Face folder")
                .into()
        })
    }

    /// Returns the companions of a run with this recipe, in JSON. `tokenizer` is the tokenizer of its data.
    ///
    /// # Errors
    /// Returns an error if a file of the recipe cannot be read.
    pub fn of_recipe(recipe: &Value, tokenizer: Option<&str>) -> Result<Self, Error> {
        let origin = match loaded(recipe)? {
            Some(path) => origin_of(&path, MAX_RUNS).map_err(|error| {
                let path = path.display();
                format!("the run was loaded from {path}, which has its config.json and tokenizer: {error}")
            })?,
            None => None,
        };
        let tokenizer = tokenizer.filter(|name| *name != BYTES);
        let tokenizer = tokenizer.map(|name| {
            let files = TokenizerFiles::read(Path::new(name));
            files.map_err(|error| format!("data.tokenizer = {name:?}: {error}"))
        });
        let template = recipe["data"]["chat"]["template"].as_str().map(|path| {
            let read = fs::read(path);
            read.map_err(|error| format!("data.chat.template = {path:?}: {error}"))
        });
        Ok(Self {
            origin: origin.map(Origin::Loaded),
            tokenizer: tokenizer.transpose()?,
            template: template.transpose()?,
        })
    }

    /// Returns the origin of the `config.json`.
    pub fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }

    /// Replaces the tokenizer and the chat template by the tokenizer and the template of the data, if they differ.
    pub fn apply(&self, tokens: &mut SpecialTokenIds, files: &mut Files) {
        if let Some(own) = &self.tokenizer
            && find(files, TOKENIZER) != find(&own.files, TOKENIZER)
        {
            files.clone_from(&own.files);
            tokens.clone_from(&own.tokens);
        }
        if let Some(template) = &self.template {
            files.retain(|(name, _)| name != TEMPLATE);
            files.push((TEMPLATE.into(), template.clone()));
        }
    }
}

impl TokenizerFiles {
    /// Reads a tokenizer and its companion files.
    fn read(path: &Path) -> Result<Self, Error> {
        let tokenizer = Tokenizer::open(path)?;
        let files = if path.is_dir() {
            companion_files(path)?
        } else {
            let mut files = companion_files(path.parent().unwrap_or(Path::new(".")))?;
            files.retain(|(name, _)| SMALL_FILES.contains(&&name[..]));
            files.push((TOKENIZER.into(), fs::read(path)?));
            files
        };
        let special = tokenizer.special();
        let stops = special.stop_tokens.iter().copied();
        let others = stops.filter(|token| Some(*token) != special.eos);
        let tokens = SpecialTokenIds {
            bos: special.bos,
            eos: special.eos.into_iter().chain(others).collect(),
            pad: special.pad,
        };
        Ok(Self { files, tokens })
    }
}

fn find<'a>(files: &'a [(String, Vec<u8>)], name: &str) -> Option<&'a Vec<u8>> {
    let found = files.iter().find(|(own, _)| own == name)?;
    Some(&found.1)
}

/// Returns the model that a recipe loads.
fn loaded(recipe: &Value) -> Result<Option<PathBuf>, Error> {
    let lora = Option::<LoraConfig>::deserialize(&recipe["lora"]);
    let lora =
        lora.map_err(|error| format!("invalid [lora] in the recipe of the checkpoint: {error}"))?;
    let base = lora.and_then(|lora| lora.base().map(PathBuf::from));
    Ok(base.or_else(|| Some(recipe["checkpoint"]["load"].as_str()?.into())))
}

/// Returns the Hugging Face folder of a model, or the checkpoint that stores the files of the folder. Follows a run
/// to the model that it was loaded from, through at most `runs` runs.
fn origin_of(path: &Path, runs: usize) -> Result<Option<PathBuf>, Error> {
    if is_hf_folder(path) {
        return Ok(Some(path.into()));
    }
    let next = if is_peft_folder(path) {
        adapted_model(path)?
    } else {
        let checkpoint = open_checkpoint(path)?;
        if !stored_hf_files(&checkpoint)?.is_empty() {
            return Ok(Some(checkpoint.path().into()));
        }
        loaded(&checkpoint.metadata().config)?
    };
    match (next, runs) {
        (Some(next), 1..) => origin_of(&next, runs - 1),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::parsed;
    use crate::save_hf;

    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

    fn of(data: &str, more: &str) -> Result<Companions, String> {
        let recipe = parsed(&format!("{more}\n[data]\n{data}"));
        let found = save_hf::companions(&recipe.map_err(|error| error.to_string())?);
        found.map_err(|error| error.to_string())
    }

    fn names(files: &[(String, Vec<u8>)]) -> Vec<&str> {
        files.iter().map(|(name, _)| &name[..]).collect()
    }

    #[test]
    fn a_run_of_its_own_has_the_tokenizer_of_its_data() {
        let folder = format!("{FIXTURES}/burn-megatron-data/tests/fixtures/tokenizer/byte_bpe");
        let expected = Tokenizer::open(folder.as_ref()).unwrap();
        for tokenizer in [folder.clone(), format!("{folder}/tokenizer.json")] {
            let found = of(&format!("tokenizer = '{tokenizer}'"), "").unwrap();
            let (mut tokens, mut files) = Default::default();
            found.apply(&mut tokens, &mut files);
            assert_eq!(tokens.eos.first().copied(), expected.special().eos);
            let written = files.iter().cloned().collect();
            let written = Tokenizer::from_files("written".as_ref(), &written).unwrap();
            assert_eq!(written.fingerprint(), expected.fingerprint());
            assert_eq!(written.special(), expected.special());
        }
        let (mut tokens, mut files) = Default::default();
        of("", "").unwrap().apply(&mut tokens, &mut files);
        assert!(files.is_empty(), "bytes have no files");
        let error = of("tokenizer = '/nowhere/tokenizer'", "").unwrap_err();
        assert!(error.contains("/nowhere/tokenizer"), "{error}");
    }

    #[test]
    fn a_loaded_run_has_the_files_of_its_folder_and_the_tokenizer_of_its_data() {
        let llama = format!("{FIXTURES}/models/tests/fixtures/hf/llama2");
        let load = |path: &str| format!("[checkpoint]\nload = '{path}'");
        let found = of("", &load(&llama)).unwrap();
        assert!(matches!(found.origin(), Some(Origin::Loaded(path)) if *path == Path::new(&llama)));
        let error = of("", "[lora]\nbase_model = '/nowhere'").unwrap_err();
        assert!(
            error.contains("the run was loaded from /nowhere"),
            "{error}"
        );
        // A different tokenizer replaces all files of the loaded tokenizer. The template of the data replaces the
        // loaded template.
        let bpe = format!("{FIXTURES}/burn-megatron-data/tests/fixtures/tokenizer/byte_bpe");
        let template = format!("{FIXTURES}/burn-megatron-data/tests/fixtures/chat/chatml.jinja");
        let data =
            format!("tokenizer = '{bpe}'\nchat = {{ files = ['x'], template = '{template}' }}");
        let found = of(&data, "").unwrap();
        let file = |name: &str, text: &[u8]| (name.to_string(), text.to_vec());
        let own = fs::read(format!("{bpe}/tokenizer.json")).unwrap();
        for (tokenizer, is_kept) in [(&b"{}"[..], false), (&own, true)] {
            let mut files = vec![
                file(TOKENIZER, tokenizer),
                file("vocab.json", b"{}"),
                file(TEMPLATE, b""),
            ];
            let mut tokens = SpecialTokenIds {
                bos: Some(77),
                ..Default::default()
            };
            found.apply(&mut tokens, &mut files);
            assert_eq!(names(&files).contains(&"vocab.json"), is_kept);
            assert_eq!(tokens.bos == Some(77), is_kept);
            assert_eq!(find(&files, TOKENIZER), Some(&own));
            assert_eq!(find(&files, TEMPLATE), Some(&fs::read(&template).unwrap()));
        }
    }
}
