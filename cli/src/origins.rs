//! The sources of the values of a recipe.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use crate::error::Error;
use crate::recipe::Recipe;
use crate::resume_check;
use crate::settings::keys::{dotted, is_within};
use crate::settings::twice;

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The default recipe, or the defaults of the library.
    Default,
    /// A recipe file.
    File(PathBuf),
    /// The flag of the key.
    Flag,
    /// `--set`.
    Set,
    /// The weights that the run loads.
    Weights(PathBuf),
    /// The run that is resumed.
    Resumed(PathBuf),
    /// The value of another key of its table.
    Adapted(&'static str),
    /// The tokenizer of the data.
    Tokenizer,
    /// The text of the data.
    Data,
}

impl fmt::Display for Origin {
    /// Writes the origin for a comment in TOML.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |path: &Path| path.display().to_string().replace(char::is_control, " ");
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => f.write_str(&shown(path)),
            Self::Flag => f.write_str("flag"),
            Self::Set => f.write_str("--set"),
            Self::Weights(path) => write!(f, "weights {}", shown(path)),
            Self::Resumed(path) => write!(f, "resumed {}", shown(path)),
            Self::Adapted(key) => write!(f, "in proportion to {key}"),
            Self::Tokenizer => f.write_str("tokenizer"),
            Self::Data => f.write_str("beginning of the held-out data"),
        }
    }
}

/// Sources of the values of a recipe, by dotted key. A key that is not recorded has the source of its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origins {
    others: Origin,
    keys: BTreeMap<String, Origin>,
}

impl Origins {
    /// Creates origins in which all values have one source.
    pub fn new(others: Origin) -> Self {
        let keys = BTreeMap::new();
        Self { others, keys }
    }

    /// Records the source of the keys of a layer. Keys of the default recipe are not recorded.
    pub fn record(&mut self, path: &str, layer: &Table, origin: &Origin) {
        if *origin == Origin::Default {
            return;
        }
        for (key, value) in layer {
            let path = dotted(path, key);
            match value {
                Value::Table(table) => self.record(&path, table, origin),
                _ => self.derive(&path, origin.clone()),
            }
        }
    }

    /// Records the source of a key.
    pub fn derive(&mut self, path: &str, origin: Origin) {
        self.keys.retain(|key, _| !is_within(key, path));
        self.keys.insert(path.into(), origin);
    }

    /// Records these weights as the source of all keys of a table that have no other source.
    pub fn record_weights(&mut self, table: &str, path: &Path) {
        self.keys.insert(table.into(), Origin::Weights(path.into()));
    }

    /// Records the keys that flags changed in a recipe.
    ///
    /// # Errors
    /// Returns an error if a key is also given by `--set` or by another flag.
    pub fn record_flags(&mut self, before: &Recipe, after: &Recipe) -> Result<(), Error> {
        let [before, after] = [before, after].map(serde_json::to_value);
        for key in resume_check::differing(&before?, &after?) {
            let given = self.keys.iter().find(|(path, origin)| {
                let is_given = matches!(origin, Origin::Set | Origin::Flag);
                is_given && (is_within(path, &key) || is_within(&key, path))
            });
            match given {
                Some((_, Origin::Set)) => return Err(twice(&key)),
                Some(_) => return Err(format!("{key} is set by two flags: remove one").into()),
                None => {}
            }
            self.derive(&key, Origin::Flag);
        }
        Ok(())
    }

    /// Returns the source of a key.
    fn of(&self, path: &str) -> &Origin {
        let mut tables = self.keys.iter().rev();
        let found = tables.find(|(table, _)| is_within(path, table));
        found.map_or(&self.others, |(_, origin)| origin)
    }

    /// Returns whether the value of a key is from the command line.
    pub fn is_of_command_line(&self, path: &str) -> bool {
        matches!(self.keys.get(path), Some(Origin::Flag | Origin::Set))
    }

    /// Returns whether a key, or a key in the table of this name, was given by a file or a flag.
    pub fn is_given(&self, path: &str) -> bool {
        self.keys.iter().any(|(key, origin)| {
            let given = matches!(origin, Origin::File(_) | Origin::Flag | Origin::Set);
            given && (is_within(key, path) || is_within(path, key))
        })
    }

    /// Returns whether a key has the value of a recipe file or of the run that is resumed.
    pub fn is_of_user(&self, path: &str) -> bool {
        matches!(self.of(path), Origin::File(_) | Origin::Resumed(_))
    }

    /// Returns whether a key has the value of the default recipe or of the library.
    pub fn is_default(&self, path: &str) -> bool {
        *self.of(path) == Origin::Default
    }

    /// Returns the text of a recipe in TOML with the source of each value as a comment.
    ///
    /// # Errors
    /// Returns an error if the text is not TOML.
    pub fn annotate(&self, text: &str) -> Result<String, Error> {
        let (mut table, mut entry, mut annotated) = (String::new(), String::new(), String::new());
        for line in text.lines() {
            if !entry.is_empty() {
                entry.push('\n');
            }
            entry += line;
            // Collect lines until the entry parses, because a value may have several lines.
            let Ok(parsed) = entry.parse::<Table>() else {
                continue;
            };
            let is_header = entry.starts_with('[');
            if is_header {
                table = header_path(&parsed);
            }
            let key = parsed.keys().next().filter(|_| !is_header);
            match key.map(|key| dotted(&table, key)) {
                Some(path) if path != "base" => {
                    writeln!(annotated, "{entry:<COMMENTS$}  # {}", self.of(&path))?;
                }
                _ => writeln!(annotated, "{entry}")?,
            }
            entry.clear();
        }
        if entry.is_empty() {
            Ok(annotated)
        } else {
            Err(format!("not TOML: {entry}").into())
        }
    }
}

/// The column at which comments start.
const COMMENTS: usize = 40;

/// Returns the path of a header such as `[a.b]`, from its parsed tables.
fn header_path(parsed: &Table) -> String {
    let (mut path, mut table) = (String::new(), Some(parsed));
    while let Some((key, value)) = table.and_then(|table| table.iter().next()) {
        path = dotted(&path, key);
        table = match value {
            Value::Array(list) => list.first().and_then(Value::as_table),
            value => value.as_table(),
        };
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_read_again_with_its_comments() {
        let mut recipe =
            crate::recipe::parsed("[lora]\nrank = 8\n[fp8]\nrecipe = 'delayed'").unwrap();
        recipe.sample.prompt = "two\nlines # and '''quotes''' \"".into();
        recipe.train.batch_warmup = vec![burn_megatron_train::BatchWarmup {
            until_step: 3,
            global_batch_size: 8,
        }];
        let mut origins = Origins::new(Origin::Default);
        let file: Table = "[train]\nclip = 1.0\nbatch_warmup = []".parse().unwrap();
        origins.record("", &file, &Origin::File("a\nb".into()));
        origins.record_weights("model", "weights".as_ref());
        let before = recipe.clone();
        recipe.memory.offload.prefetch = 5;
        origins.record_flags(&before, &recipe).unwrap();
        let text = toml::to_string(&recipe.complete()).unwrap();
        let annotated = origins.annotate(&text).unwrap();
        assert_eq!(crate::recipe::parsed(&annotated).unwrap(), recipe);
        let comment = |start: &str| {
            let mut lines = annotated.lines();
            let line = lines.find(|line| line.starts_with(start)).unwrap();
            line.rsplit_once("  # ").unwrap().1
        };
        for (key, wanted) in [
            ("clip", "a b"),
            ("until_step", "a b"),
            ("steps", "default"),
            ("hidden", "weights weights"),
            ("prefetch", "flag"),
            ("rank", "default"),
        ] {
            assert_eq!(comment(&format!("{key} = ")), wanted, "{annotated}");
        }
        let set: Table = "train.clip = 1.0".parse().unwrap();
        origins.record("", &set, &Origin::Set);
        let before = recipe.clone();
        recipe.train.clip = 2.0;
        let error = origins.record_flags(&before, &recipe).unwrap_err();
        assert!(
            error.to_string().starts_with("train.clip is set by --set"),
            "{error}"
        );
    }
}
