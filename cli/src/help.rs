//! Adds the values of the recipe to the help of `pretrain`.

use clap::builder::StyledStr;
use clap::{Arg, Command};
use toml::Table;

use crate::recipe::Recipe;
use crate::settings::keys::get;

/// Adds the value of each setting in the default recipe to the help of `pretrain`, as in `[recipe: 200]`.
pub fn with_values(command: Command, recipe: &Recipe) -> Command {
    let Ok(recipe) = Table::try_from(recipe) else {
        return command; // `pretrain` reports the error
    };
    command.mut_subcommand("pretrain", |pretrain| {
        pretrain.mut_args(|arg| {
            let value = get(&recipe, arg.get_id().as_str()).filter(|value| !value.is_table());
            match value.map(|value| format!(" [recipe: {value}]")) {
                Some(note) => with_note(arg, &note),
                None => arg,
            }
        })
    })
}

/// Appends a note to the help of a flag.
fn with_note(mut arg: Arg, note: &str) -> Arg {
    let noted = |help: &StyledStr| format!("{help}{note}");
    if let Some(help) = arg.get_long_help().map(noted) {
        arg = arg.long_help(help);
    }
    match arg.get_help().map(noted) {
        Some(help) => arg.help(help),
        None => arg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::family::Families;
    use crate::recipe::{DEFAULT_RECIPE, parsed};

    fn pretrain() -> Command {
        let recipe = parsed(DEFAULT_RECIPE).unwrap();
        let families = Families::transformers();
        let mut command = with_values(Cli::with_families(&families), &recipe);
        command.build();
        command.find_subcommand("pretrain").unwrap().clone()
    }

    #[test]
    fn flags_have_the_values_of_the_recipe() {
        let pretrain = pretrain().term_width(300);
        let short = pretrain.clone().render_help().to_string();
        let line = |flag: &str| {
            let mut lines = short.lines();
            let line = lines.find(|line| line.trim_start().starts_with(flag));
            line.unwrap_or_else(|| panic!("{flag} in {short}"))
        };
        assert!(
            line("--parallel.tensor <").contains("[recipe: 2] [alias: --tp]"),
            "{short}"
        );
        assert!(line("--data_parallel.precision <").contains("[recipe: \"f32\"]"));
        assert!(short.find("Data:") < short.find("Settings of [parallel]:"));
        assert!(!short.contains("--model.hidden"), "{short}");
        let long = pretrain.clone().render_long_help().to_string();
        assert!(long.contains("--model.hidden <N>"), "{long}");
        assert!(long.contains("[recipe: \"llama\"]"), "{long}");
    }

    /// Flags are listed in groups, so every flag needs a heading.
    #[test]
    fn every_flag_of_pretrain_has_a_heading() {
        let pretrain = pretrain();
        let without = pretrain.get_arguments();
        let without = without.filter(|arg| arg.get_help_heading().is_none() && !arg.is_hide_set());
        let without: Vec<_> = without.map(|arg| arg.get_id().as_str()).collect();
        assert!(without.len() < 10, "{without:?}");
    }
}
