//! Parses flags in tests.

use clap::{Args, Command, Error};

use crate::family::Families;
use crate::settings::Settings;

/// Parses the flags of a command, without its name.
pub fn parse<T: Args>(flags: &[&str]) -> Result<T, Error> {
    let command = T::augment_args(Command::new("test").no_binary_name(true));
    let settings = Settings::of(&Families::transformers());
    let command = settings.add_flags(command, "model.");
    T::from_arg_matches(&command.try_get_matches_from(flags)?)
}

/// Parses flags that are separated by whitespace.
pub fn parse_text<T: Args>(flags: &str) -> Result<T, Error> {
    parse(&flags.split_whitespace().collect::<Vec<_>>())
}
