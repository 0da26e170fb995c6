//! `cargo xtask first-hour`: runs and times the first steps of a new user.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::process::{read_quietly, run as run_command};
use crate::report::Report;
use crate::temp::TempDir;

/// The folder, and the program that is used as the installed program.
#[derive(Args)]
pub struct Options {
    /// Work in this empty folder and keep it. The default is a temporary folder.
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Use this program as the installed program. Nothing is cloned or built.
    #[arg(long, value_name = "FILE")]
    command: Option<PathBuf>,
    /// Build features of the installed program, as in `--no-default-features` and `--features mpi`.
    #[arg(last = true, value_name = "FLAG")]
    features: Vec<String>,
}

/// The environment variables that a step keeps.
const VARIABLES: [&str; 6] = [
    "PATH",
    "HOME",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "RUSTUP_TOOLCHAIN",
    "TMPDIR",
];

/// The number of steps of the run on the user's text, and the step that Ctrl-C interrupts.
const STEPS: &str = "200";
const INTERRUPTED: &str = "interrupt@rank=0,step=80,call=0";

/// The exit code of a run that was interrupted and saved.
const WAS_INTERRUPTED: i32 = 130;

const PROMPT: &str = "The ";

/// Runs all steps. Each step is one command, or an action of the user between two commands.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    let mut temporary = None;
    let mut folder = PathBuf::new();
    report.step("folder", || {
        folder = match &options.folder {
            Some(folder) => empty(folder)?,
            None => {
                let made =
                    TempDir::new("first-hour").map_err(|e| format!("a temporary folder: {e}"))?;
                temporary.insert(made).path().to_path_buf()
            }
        };
        println!("{}", folder.display());
        Ok::<_, String>(())
    });
    if folder.as_os_str().is_empty() {
        return;
    }
    let mut user = User {
        root,
        program: options.command.clone(),
        folder,
    };
    let steps: [(&'static str, Step<'_>); 7] = [
        ("clone", User::clone_repository),
        ("install", User::install),
        ("default recipe", User::train_default),
        ("text, interrupted", User::train_text),
        ("resume", User::resume),
        ("generate", User::generate),
        ("convert", User::convert),
    ];
    for (name, step) in steps {
        let mut passed = false;
        report.step(name, || {
            let result = step(&mut user, options);
            passed = result.is_ok();
            result
        });
        if !passed {
            if let Some(temporary) = &mut temporary {
                temporary.keep();
                println!("the folder is kept: {}", user.folder.display());
            }
            return;
        }
    }
}

type Step<'a> = fn(&mut User<'a>, &Options) -> Result<(), String>;

/// Returns the folder. It must exist and be empty.
fn empty(folder: &Path) -> Result<PathBuf, String> {
    let failed = |error| format!("{}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(failed)?;
    if fs::read_dir(folder).map_err(failed)?.next().is_some() {
        return Err(format!("{} is not empty", folder.display()));
    }
    folder.canonicalize().map_err(failed)
}

struct User<'a> {
    /// The repository to clone.
    root: &'a Path,
    /// The installed program.
    program: Option<PathBuf>,
    folder: PathBuf,
}

impl User<'_> {
    /// Returns a command in a subfolder, with few environment variables.
    fn command(&self, program: impl AsRef<Path>, folder: &str) -> Command {
        let mut command = Command::new(program.as_ref());
        command.current_dir(self.folder.join(folder));
        for (name, _) in env::vars_os() {
            if !VARIABLES.iter().any(|kept| name == *kept) {
                command.env_remove(&name);
            }
        }
        command
    }

    /// Returns a command for the installed program, in the folder of the user's files.
    fn installed(&self, words: &[&str]) -> Result<Command, String> {
        let program = self.program.as_ref().ok_or("nothing is installed")?;
        let mut command = self.command(program, "work");
        command.args(words);
        Ok(command)
    }

    fn clone_repository(&mut self, _: &Options) -> Result<(), String> {
        fs::create_dir(self.folder.join("work")).map_err(|error| format!("work: {error}"))?;
        if self.program.is_some() {
            println!("nothing to clone: --command is given");
            return Ok(());
        }
        let mut git = self.command("git", "");
        run_command(
            git.args(["clone", "--quiet"])
                .arg(self.root)
                .arg("burn-megatron"),
        )
    }

    fn install(&mut self, options: &Options) -> Result<(), String> {
        if let Some(program) = &self.program {
            let found = program.canonicalize();
            self.program = Some(found.map_err(|error| format!("{}: {error}", program.display()))?);
            return run_command(&mut self.installed(&["--version"])?);
        }
        let installed = self.folder.join("installed");
        let mut cargo = self.command("cargo", "burn-megatron");
        cargo.args(["install", "--path", "cli", "--locked", "--root"]);
        run_command(cargo.arg(&installed).args(&options.features))?;
        self.program = Some(installed.join("bin/burn-megatron"));
        Ok(())
    }

    fn train_default(&mut self, _: &Options) -> Result<(), String> {
        if !self.folder.join("burn-megatron").is_dir() {
            println!("left out: without a checkout there is no default text");
            return Ok(());
        }
        run_command(&mut self.installed(&["pretrain", "--run-dir", "runs/first"])?)
    }

    /// Trains on the book as the user's text.
    fn train_text(&mut self, _: &Options) -> Result<(), String> {
        let failed = |error| format!("the text: {error}");
        let pages = fs::read_dir(self.root.join("docs/src")).map_err(failed)?;
        let mut pages: Vec<_> = pages.flatten().map(|page| page.path()).collect();
        pages.retain(|page| page.extension().is_some_and(|end| end == "md"));
        pages.sort();
        let mut text = String::new();
        for page in pages {
            text += &fs::read_to_string(page).map_err(failed)?;
        }
        fs::write(self.folder.join("work/my.txt"), text).map_err(failed)?;
        let run = ["pretrain", "--data", "my.txt", "--steps", STEPS];
        let run = [
            &run[..],
            &["--run-dir", "runs/mine", "--inject", INTERRUPTED],
        ]
        .concat();
        let mut command = self.installed(&run)?;
        let status = command
            .status()
            .map_err(|error| format!("pretrain: {error}"))?;
        match status.code() {
            Some(WAS_INTERRUPTED) => Ok(()),
            _ => Err(format!("the interrupted run ended with {status}")),
        }
    }

    fn resume(&mut self, _: &Options) -> Result<(), String> {
        run_command(&mut self.installed(&["pretrain", "--resume", "runs/mine"])?)?;
        let last = format!("work/runs/mine/checkpoints/step-{STEPS:0>8}");
        if self.folder.join(&last).is_dir() {
            Ok(())
        } else {
            Err(format!("there is no {last}"))
        }
    }

    fn generate(&mut self, _: &Options) -> Result<(), String> {
        let text = self.text(&["--model", "runs/mine"])?;
        println!("{text}");
        Ok(())
    }

    /// Converts the model, and checks that the converted model generates the same text.
    fn convert(&mut self, _: &Options) -> Result<(), String> {
        let convert = ["convert", "runs/mine", "hf"];
        run_command(&mut self.installed(&convert)?)?;
        let before = self.text(&["--model", "runs/mine"])?;
        let after = self.text(&["--model", "hf", "--tokenizer", "bytes"])?;
        if before == after {
            Ok(())
        } else {
            Err(format!(
                "the converted model writes {after:?}, not {before:?}"
            ))
        }
    }

    fn text(&self, model: &[&str]) -> Result<String, String> {
        let words = ["generate", "--prompt", PROMPT, "--max-tokens", "60"];
        let mut command = self.installed(&[&words[..], model].concat())?;
        let mut text = String::new();
        read_quietly(&mut command, |line| text += line)?;
        if text.len() > PROMPT.len() {
            Ok(text)
        } else {
            Err(format!("nothing but {text:?} was generated"))
        }
    }
}
