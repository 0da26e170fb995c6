//! The command line, to which users can add their own models.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use burn_megatron::comm::WorldError;
use burn_megatron::device::failure;
use burn_megatron::model::ModelConfig;
use burn_megatron_models::hf::HfFamily;
use burn_megatron_train::{ReplayError, TrainError, Verdict};
use clap::FromArgMatches;

use crate::cli::{Cli, Command, ConfigArgs, LogArgs};
use crate::error::Error;
use crate::family::Families;
use crate::recipe::{DEFAULT_RECIPE, Recipe};
use crate::settings::Settings;
use crate::{
    allocator, check_gpu, checkpoint, compare, conformance, convert, env, file_size_limit,
    generate, help, launch, plan, preprocess, pretrain, schedule, stdio, verify,
};

/// The exit code for wrong usage, as in clap.
const USAGE: u8 = 2;

/// The message for the command `bench`.
const BENCH: &str = "bench is another program: use burn-megatron-bench COMMAND, or in a checkout \
                     cargo run --release -p burn-megatron-bench -- COMMAND";

/// A command line with all commands of `burn-megatron`, such as `pretrain`, `verify`, `generate`, `checkpoint` and
/// `launch`, for the model families that are registered with it.
///
/// ```no_run
/// # use burn_megatron_models::TransformerConfig as MyConfig;
/// use std::process::ExitCode;
///
/// use burn_megatron_cli::CommandLine;
///
/// fn main() -> ExitCode {
///     CommandLine::new("my-model")
///         .with_family("mine", MyConfig::default())
///         .with_recipe("[model]\nfamily = \"mine\"")
///         .run()
/// }
/// ```
#[derive(Clone, Debug)]
pub struct CommandLine {
    name: &'static str,
    families: Families,
    /// The default recipe in TOML. It is used without flags, and contains the default values for keys that other
    /// recipes do not set.
    recipe: String,
}

/// The `burn-megatron` command.
impl Default for CommandLine {
    fn default() -> Self {
        Self {
            name: "burn-megatron",
            families: Families::transformers(),
            recipe: DEFAULT_RECIPE.into(),
        }
    }
}

impl CommandLine {
    /// Creates a command line without model families. `name` is the name of the program.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            families: Families::none(),
            recipe: String::new(),
        }
    }

    /// Registers a model family. A recipe selects it with `family = "NAME"` in the table `[model]`. `defaults` contains
    /// the values of settings that the recipe does not set. A recipe without a family uses the family of the [default
    /// recipe](Self::with_recipe), or otherwise the first registered family. If there is already a family with this
    /// name, it is replaced.
    pub fn with_family<C: ModelConfig>(mut self, name: &'static str, defaults: C) -> Self {
        self.families.add(name, defaults);
        self
    }

    /// Registers a Hugging Face model family, like [`with_family`](Self::with_family). Its name is its `model_type`.
    /// The command `convert` can then read and write Hugging Face folders of this family, and `pretrain --load` and
    /// `generate --model` can read them.
    pub fn with_hugging_face_family<F: HfFamily>(mut self, family: F, defaults: F::Model) -> Self {
        self.families.add_hf(family, defaults);
        self
    }

    /// Sets the default recipe (TOML). `pretrain` uses it if `--recipe` is not given. It also contains the default
    /// values for keys that other recipes do not set.
    pub fn with_recipe(mut self, recipe: impl Into<String>) -> Self {
        self.recipe = recipe.into();
        self
    }

    /// Runs the command that the arguments of the program select. Returns the exit code, which is 2 for invalid
    /// arguments.
    pub fn run(&self) -> ExitCode {
        self.run_from(std::env::args_os())
    }

    /// Runs the command that `args` select, like [`run`](Self::run). The first argument is the name of the program.
    pub fn run_from(
        &self,
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> ExitCode {
        let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        if let Some(text) = self.help_of_key(&args) {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        let matches = self.clap(&args).try_get_matches_from(&args);
        let mut cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
            Ok(cli) => cli,
            Err(error) => match self.explain(&args, &error) {
                Some(renamed) => {
                    eprintln!("error: {renamed}");
                    return ExitCode::from(USAGE);
                }
                None => error.exit(),
            },
        };
        if let Command::Pretrain(args) = &mut cli.command {
            args.follow_restart();
        }
        run_program(&cli.log, || self.command(&cli.command))
    }

    /// Returns the message for the command `bench`, or for an unknown flag of `pretrain` that is named like a
    /// setting.
    fn explain(&self, args: &[OsString], error: &clap::Error) -> Option<String> {
        if args.get(1).is_some_and(|command| command == "bench") {
            return Some(BENCH.into());
        }
        let is_pretrain = args.iter().any(|arg| arg == "pretrain");
        is_pretrain.then(|| Settings::of(&self.families).explain_flag(error))?
    }

    /// Returns the text of `pretrain --help KEY`, or `None` for other arguments.
    fn help_of_key(&self, args: &[OsString]) -> Option<String> {
        let at = args.iter().position(|arg| arg == "--help" || arg == "-h")?;
        let key = args
            .get(at + 1)?
            .to_str()
            .filter(|key| !key.starts_with('-'))?;
        (args.get(1)? == "pretrain").then(|| Settings::of(&self.families).look_up(key))?
    }

    /// Prints the settings of a key.
    fn config(&self, key: &str) -> Result<ExitCode, Error> {
        let Some(text) = Settings::of(&self.families).look_up(key) else {
            return Err(format!(
                "no recipe key contains {key}: expected a part of a key, such as steps"
            )
            .into());
        };
        print!("{text}");
        Ok(ExitCode::SUCCESS)
    }

    /// Returns the clap command. If the arguments ask for help, it includes the values of the default recipe.
    fn clap(&self, args: &[OsString]) -> clap::Command {
        let command = Cli::with_families(&self.families).name(self.name);
        let asks = |arg: &OsString| arg == "-h" || arg == "--help" || arg == "help";
        if !args.iter().any(asks) {
            return command;
        }
        match Recipe::parse(&self.recipe, &self.families) {
            Ok(recipe) => help::with_values(command, &recipe),
            Err(_) => command,
        }
    }

    fn command(&self, command: &Command) -> Result<ExitCode, Error> {
        match command {
            Command::Pretrain(args) => pretrain::run(args, &self.families, &self.recipe),
            Command::Config(ConfigArgs { key }) => self.config(key),
            Command::Preprocess(args) => preprocess::run(args),
            Command::Generate(args) => generate::run(args, &self.families),
            Command::Launch(args) => launch::run(args, &self.families, &self.recipe),
            #[cfg(unix)]
            Command::LaunchSlot => launch::slot::run(),
            Command::Compare(args) => compare::run(args),
            Command::Convert(args) => convert::run(args, &self.families),
            Command::Verify(args) => verify::run(args, &self.families, &self.recipe),
            Command::Plan(args) => plan::run(args, &self.families, &self.recipe),
            Command::Schedule(args) => schedule::run(args),
            Command::Conformance(args) => conformance::run(args),
            Command::Env(args) => env::run(args),
            Command::CheckGpu(args) => check_gpu::run(args),
            Command::Checkpoint(command) => checkpoint::run(command, &self.families),
        }
    }
}

/// Runs the work of a program with its log on standard error. Prints an error, and returns the exit code.
pub fn run_program(
    LogArgs { log_level }: &LogArgs,
    work: impl FnOnce() -> Result<ExitCode, Error>,
) -> ExitCode {
    allocator::keep_freed_memory();
    file_size_limit::make_it_an_error();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(log_level.filter()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // The names of a rank's threads contain the rank.
        .with_thread_names(true)
        .with_span_events(log_level.span_events())
        .init();
    // Results after the first failure of a device are wrong, so the command fails even if its work succeeded.
    let result = work().and_then(|code| failure().map(|()| code).map_err(Error::from));
    let code = match result {
        Ok(code) => code,
        Err(error) => fail(&*error),
    };
    if code == ExitCode::SUCCESS && !stdio::finish() {
        return ExitCode::FAILURE;
    }
    code
}

/// Returns the verdict of the check of steps, if the check ended the run.
fn verdict(error: &(dyn std::error::Error + Send + Sync + 'static)) -> Option<Verdict> {
    let error = match error.downcast_ref::<WorldError>() {
        Some(WorldError::RankFailed { source, .. }) => &**source,
        _ => error,
    };
    match (error.downcast_ref(), error.downcast_ref()) {
        (Some(TrainError::Replay(found)), _) | (_, Some(found)) => {
            let ReplayError { verdict, .. } = found;
            Some(*verdict)
        }
        _ => None,
    }
}

/// Prints the error, unless it was already printed for all ranks, and returns its exit code.
fn fail(error: &(dyn std::error::Error + Send + Sync + 'static)) -> ExitCode {
    let of_world = error.downcast_ref::<WorldError>();
    if !of_world.is_some_and(WorldError::is_reported) {
        // Write in one piece, because several processes may write at once.
        let error = error.to_string();
        let note = file_size_limit::note(&error);
        let note = note.map_or(String::new(), |note| format!("note: {note}\n"));
        let _ = std::io::stderr().write_all(format!("error: {error}\n{note}").as_bytes());
    }
    match (verdict(error), of_world) {
        (Some(verdict), _) => ExitCode::from(verdict.exit_code()),
        (None, Some(error)) => ExitCode::from(error.exit_code()),
        (None, None) => ExitCode::FAILURE,
    }
}
