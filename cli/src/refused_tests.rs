//! Which values each setting accepts on the command line: a change of texts must not change it.

use clap::{Args, Command, FromArgMatches};

use super::planned;
use crate::error::Error;
use crate::family::Families;
use crate::pretrain::args::PretrainArgs;
use crate::recipe::{DEFAULT_RECIPE, Recipe};
use crate::settings::{Setting, Settings};

/// The values that the test gives each setting, in addition to the names that the setting accepts.
const VALUES: [&str; 9] = ["-1", "0", "3", "0.5", "nan", "true", "false", "none", "x"];

fn values(setting: &Setting) -> Vec<String> {
    let names = setting.forms.names.iter().map(|name| name.text());
    let mut values: Vec<_> = VALUES.map(String::from).to_vec();
    values.extend(names.filter(|name| !VALUES.contains(&&name[..])));
    values
}

/// All other values of the list are refused. `INSTA_UPDATE=always cargo test -p burn-megatron-cli accepted_values` writes
/// the table again after a change of the rules.
#[test]
fn the_accepted_values_of_every_setting_are_as_recorded() {
    let families = Families::transformers();
    let settings = Settings::of(&families);
    let command = PretrainArgs::augment_args(Command::new("test").no_binary_name(true));
    let mut command = settings.add_flags(command, "model.");
    let mut check = |flag: &str| -> Result<(), Error> {
        let matches = command.try_get_matches_from_mut([flag])?;
        let arguments = PretrainArgs::from_arg_matches(&matches)?;
        planned(&Recipe::resolve(&arguments, &families, DEFAULT_RECIPE)?.recipe)
    };
    let mut table = String::new();
    for setting in settings.all().filter(|setting| setting.has_flag()) {
        let mut accepted = values(setting);
        accepted.retain(|value| check(&format!("--{}={value}", setting.path)).is_ok());
        table += &format!("{}: {}\n", setting.path, accepted.join(" "));
    }
    insta::assert_snapshot!("accepted_values", table);
}
