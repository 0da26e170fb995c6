//! Retired commands, flags and recipe keys, each with its successor.
//!
//! A recipe or a command line with one of them is refused. What an earlier version wrote, the configuration of a
//! checkpoint and the recipe of a run folder, is translated.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use serde_json::Value;
use toml::Table;

use crate::error::Error;
use crate::settings::Settings;

/// Keys of a recipe: `table.key`.
const KEYS: [(&str, &str); 1] = [("train.count_zeros", "train.log_num_zeros_in_grad")];

/// Flags.
const FLAGS: [(&str, &str); 7] = [
    ("--count-zeros", "--train.log_num_zeros_in_grad"),
    ("--deadline", "--timeout"),
    ("--first-deadline", "--first-timeout"),
    ("--resume-changing", "--resume-allow-change"),
    ("--runs", "--runs-dir"),
    ("--schedule", "--pipeline-schedule"),
    ("--silence", "--heartbeat-timeout"),
];

/// Flags of `launch` for several machines.
const MULTI_NODE_FLAGS: [&str; 3] = ["--nodes", "--node-rank", "--master-addr"];

/// The message that names the programs for ranks on several machines.
const MULTI_NODE: &str = "launch starts ranks on one machine; on several, use torchrun on each, or srun:
  torchrun --no-python --nnodes MACHINES --nproc-per-node RANKS --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
burn-megatron COMMAND
  srun --nodes MACHINES --ntasks-per-node RANKS burn-megatron COMMAND";

/// The message that names the programs for MPI ranks on several machines.
const MULTI_NODE_MPI: &str = "launch starts ranks on one machine; on several, use mpirun or srun:
  mpirun --host HOST:RANKS,HOST:RANKS --bind-to none burn-megatron COMMAND
  srun --mpi=pmix --nodes MACHINES --ntasks-per-node RANKS burn-megatron COMMAND";

/// The message for the command `bench`.
const BENCH: &str = "bench was moved to another program: use burn-megatron-bench COMMAND, or in a checkout \
                     cargo run --release -p burn-megatron-bench -- COMMAND";

/// Checks that a recipe has no retired key.
///
/// # Errors
/// The key and its successor.
pub fn check_recipe(recipe: &Table) -> Result<(), Error> {
    let is_set = |(old, _): &&(&str, &str)| {
        let (table, key) = split(old);
        let table = recipe.get(table).and_then(toml::Value::as_table);
        table.is_some_and(|table| table.contains_key(key))
    };
    match KEYS.iter().find(is_set) {
        Some((old, new)) => Err(renamed(old, new).into()),
        None => Ok(()),
    }
}

/// Checks that a key is not retired.
///
/// # Errors
/// The key and its successor.
pub fn check_key(key: &str) -> Result<(), Error> {
    match KEYS.iter().find(|(old, _)| *old == key) {
        Some((old, new)) => Err(renamed(old, new).into()),
        None => Ok(()),
    }
}

/// The error for an unknown command or flag, if it is a retired one.
pub fn explain(error: &clap::Error) -> Option<String> {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(command)) if command == "bench" => Some(BENCH.into()),
        _ => explain_flag(error),
    }
}

fn explain_flag(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let name = flag.split('=').next()?;
    if name == "--hosts" {
        return Some(format!("--hosts was removed: {MULTI_NODE_MPI}"));
    }
    if MULTI_NODE_FLAGS.contains(&name) {
        return Some(format!("{name} was removed: {MULTI_NODE}"));
    }
    match FLAGS.iter().find(|(old, _)| *old == name) {
        Some((old, new)) => Some(renamed(old, new)),
        None if error.kind() == ErrorKind::UnknownArgument => {
            Settings::without_model().explain_flag(name)
        }
        None => None,
    }
}

/// Moves the values of retired keys in the configuration of a checkpoint to their successors.
pub fn translate_config(config: &mut Value) {
    for (old, new) in KEYS {
        let ((table, key), (new_table, new_key)) = (split(old), split(new));
        let tables = config.get_mut(table).and_then(Value::as_object_mut);
        if let Some(value) = tables.and_then(|table| table.remove(key)) {
            config[new_table][new_key] = value;
        }
    }
}

/// The same in a recipe; returns whether it had any.
pub fn translate_recipe(recipe: &mut Table) -> bool {
    let mut translated = false;
    for (old, new) in KEYS {
        let ((table, key), (new_table, new_key)) = (split(old), split(new));
        let old_table = recipe.get_mut(table).and_then(toml::Value::as_table_mut);
        let Some(value) = old_table.and_then(|table| table.remove(key)) else {
            continue;
        };
        let successor = recipe.entry(new_table).or_insert(Table::new().into());
        if let Some(successor) = successor.as_table_mut() {
            successor.insert(new_key.to_owned(), value);
        }
        translated = true;
    }
    translated
}

fn renamed(old: &str, new: &str) -> String {
    format!("{old} was renamed: use {new}")
}

fn split(key: &str) -> (&str, &str) {
    key.split_once('.').unwrap_or(("", key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Families;
    use crate::flags::parse_text;
    use crate::launch::args::LaunchArgs;
    use crate::pretrain::args::PretrainArgs;
    use crate::recipe::Recipe;

    #[test]
    fn retired_flags_are_errors_that_name_their_successors() {
        for (old, new) in FLAGS {
            for flags in [format!("{old} 3"), format!("{old}=3")] {
                let error = parse_text::<PretrainArgs>(&flags).map(drop).unwrap_err();
                let wanted = format!("{old} was renamed: use {new}");
                assert_eq!(explain_flag(&error), Some(wanted), "{flags}");
            }
            let flags = format!("{new}=true");
            let known = parse_text::<PretrainArgs>(&flags).map(drop);
            let is_unknown = |error: &clap::Error| error.kind() == ErrorKind::UnknownArgument;
            assert!(!known.as_ref().is_err_and(is_unknown), "{flags}: {known:?}");
        }
        let explained = |flag: &str| {
            let error = parse_text::<PretrainArgs>(flag).map(drop);
            explain_flag(&error.unwrap_err())
        };
        assert_eq!(explained("--no-such-flag"), None);
        assert_eq!(explained("--split 1"), None, "there are two");
        assert_eq!(
            explained("--recompute-granularity full").unwrap(),
            "unexpected argument --recompute-granularity: pretrain sets memory.recompute.granularity with \
             --memory.recompute.granularity"
        );
    }

    #[test]
    fn flags_for_several_machines_name_torchrun_and_srun() {
        for (flag, commands) in [
            (
                "--nodes",
                ["\n  torchrun --no-python --nnodes", "\n  srun --nodes"],
            ),
            ("--node-rank", ["\n  torchrun", "\n  srun --nodes"]),
            ("--master-addr", ["\n  torchrun", "\n  srun --nodes"]),
            ("--hosts", ["\n  mpirun --host", "\n  srun --mpi=pmix"]),
        ] {
            for flags in [format!("{flag} 2"), format!("{flag}=2")] {
                let flags = format!("--ranks 2 {flags} -- pretrain");
                let error = parse_text::<LaunchArgs>(&flags).map(drop).unwrap_err();
                let text = explain_flag(&error).unwrap();
                let start = format!("{flag} was removed: launch starts ranks on one machine; ");
                assert!(text.starts_with(&start), "{text}");
                for command in commands {
                    assert!(text.contains(command), "{text}");
                }
            }
        }
    }

    #[test]
    fn retired_keys_are_errors_that_name_their_successors() {
        let recipe = serde_json::to_value(Recipe::default()).unwrap();
        for (old, new) in KEYS {
            let (table, key) = split(old);
            let error = crate::recipe::parsed(&format!("[{table}]\n{key} = true")).unwrap_err();
            let wanted = format!("{old} was renamed: use {new}");
            assert_eq!(error.to_string(), wanted);
            assert_eq!(check_key(old).unwrap_err().to_string(), wanted);
            let (table, key) = split(new);
            assert!(recipe[table].get(key).is_some(), "{new}");
        }
        assert!(check_key("train.steps").is_ok());
    }

    #[test]
    fn what_an_earlier_version_wrote_is_translated() {
        let mut recipe: Table = "[train]\ncount_zeros = true\nsteps = 3".parse().unwrap();
        assert!(translate_recipe(&mut recipe));
        assert!(!translate_recipe(&mut recipe));
        let recipe = Recipe::from_table(recipe, &Families::transformers()).unwrap();
        assert!(recipe.train.count_zeros);
        assert_eq!(recipe.train.steps, 3);
        let mut config = serde_json::json!({"train": {"count_zeros": true}, "data": {}});
        translate_config(&mut config);
        let wanted = serde_json::json!({"train": {"log_num_zeros_in_grad": true}, "data": {}});
        assert_eq!(config, wanted);
    }
}
