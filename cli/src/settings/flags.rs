//! Creates a flag for each setting.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use toml::{Table, Value};

use super::Settings;
use super::keys::{get, is_within, set};
use super::setting::{Setting, merge};
use super::value::Given;

/// Values that a command line gives to keys of a recipe, as in `--parallel.tensor 2`. Each table comes before its
/// keys. `none` means no value.
#[derive(Clone, Debug, Default)]
pub struct SettingFlags {
    given: Vec<(String, Given)>,
}

/// Flags of the NCCL settings, for commands without a recipe.
#[derive(Clone, Debug, Default)]
pub struct NcclFlags(pub SettingFlags);

/// The setting whose value may be `auto`. The value then depends on the number of ranks that a launcher started.
const DATA: &str = "parallel.data";
const AUTO: &str = "auto";

impl Settings {
    /// Adds the flags of the settings whose keys begin with `start` to a command. `start` is `model.`, or empty for
    /// all settings.
    pub fn add_flags(&self, command: Command, start: &str) -> Command {
        let settings = self.all().filter(|setting| setting.path.starts_with(start));
        command.args(settings.filter_map(arg))
    }
}

/// Returns the flag of a setting, if it has one.
fn arg(setting: &Setting) -> Option<Arg> {
    if !setting.has_flag() {
        return None;
    }
    let path = setting.path.clone();
    let may_be_auto = path == DATA;
    let heading = match setting.path.split_once('.') {
        Some((table, _)) => format!("Settings of [{table}]"),
        None => "Settings".into(),
    };
    let forms = &setting.forms;
    let arg = Arg::new(path.clone())
        .long(path)
        .help(setting.help.clone())
        .help_heading(heading)
        .value_name(setting.value_text())
        .visible_aliases(setting.alias.clone())
        .hide_short_help(setting.alias.is_none())
        .hide(setting.is_experimental)
        .action(match forms.is_list() {
            true => ArgAction::Append,
            false => ArgAction::Set,
        });
    let arg = match forms.alone() {
        Some(value) => arg.num_args(0..=1).default_missing_value(value),
        None => arg.allow_negative_numbers(true),
    };
    let parser = setting.parser();
    Some(arg.value_parser(move |text: &str| match text {
        AUTO if may_be_auto => Ok(Given::Value(AUTO.into())),
        text => parser.parse(text),
    }))
}

impl Args for SettingFlags {
    fn augment_args(command: Command) -> Command {
        Settings::without_model().add_flags(command, "")
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut given = vec![];
        for id in matches.ids() {
            // Flags that are not generated from settings have other types.
            if let Ok(Some(values)) = matches.try_get_many::<Given>(id.as_str()) {
                given.extend(values.map(|value| (id.to_string(), value.clone())));
            }
        }
        Ok(Self::new(given))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for NcclFlags {
    fn augment_args(command: Command) -> Command {
        Settings::without_model().add_flags(command, "nccl.")
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for NcclFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        SettingFlags::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl SettingFlags {
    /// Creates the values of these keys.
    pub fn new(mut given: Vec<(String, Given)>) -> Self {
        given.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self { given }
    }

    /// Returns the keys with their values.
    pub fn given(&self) -> &[(String, Given)] {
        &self.given
    }

    /// Returns the values as the tables of a recipe. If a value names the variant that the recipe `before` already
    /// has, the settings of this variant are kept.
    pub fn table(&self, before: &Table) -> Table {
        let mut table = Table::new();
        for (path, given) in &self.given {
            let Given::Value(value) = given else {
                continue;
            };
            if path == DATA && value.as_str() == Some(AUTO) {
                continue;
            }
            let variant = get(before, path).and_then(Value::as_table);
            let is_same = |name: &str| variant.is_some_and(|variant| variant.contains_key(name));
            if value.as_str().is_some_and(is_same) {
                continue;
            }
            let value = match (get(&table, path), value) {
                (Some(Value::Array(list)), Value::Array(more)) => {
                    Value::Array(list.iter().chain(more).cloned().collect())
                }
                (Some(Value::Table(first)), Value::Table(more)) => {
                    let mut both = first.clone();
                    merge(None, &mut both, more);
                    both.into()
                }
                (_, value) => value.clone(),
            };
            set(&mut table, path, value);
        }
        table
    }

    /// Returns the keys that are unset with `none`.
    pub fn unset(&self) -> impl Iterator<Item = &str> {
        let unset = self
            .given
            .iter()
            .filter(|(_, given)| *given == Given::Unset);
        unset.map(|(path, _)| &path[..])
    }

    /// Returns the text value of a key.
    pub fn text(&self, path: &str) -> Option<&str> {
        let mut given = self.given.iter().filter(|(given, _)| given == path);
        match given.next() {
            Some((_, Given::Value(Value::String(text)))) => Some(text),
            _ => None,
        }
    }

    /// Returns whether the size of the data axis depends on the number of ranks that a launcher started.
    pub fn is_data_auto(&self) -> bool {
        self.text(DATA) == Some(AUTO)
    }

    /// Replaces the size of the data axis.
    pub fn set_data(&mut self, ranks: usize) {
        self.given.retain(|(path, _)| path != DATA);
        let ranks = i64::try_from(ranks).unwrap_or(i64::MAX);
        self.given.push((DATA.into(), Given::Value(ranks.into())));
    }

    /// Returns the keys that are given.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.given.iter().map(|(path, _)| &path[..])
    }

    /// Returns whether the key, a key below it, or a table that contains it is given.
    pub fn has(&self, path: &str) -> bool {
        self.keys()
            .any(|given| is_within(given, path) || is_within(path, given))
    }
}
