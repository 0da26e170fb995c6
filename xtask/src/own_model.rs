//! Runs the example `conv_lm`: a model with a custom mixer supports all commands.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::metrics::{check_losses, losses_in};
use crate::process::{read_quietly, run as run_command};
use crate::recipe::Programs;
use crate::temp::TempDir;

const STEPS: usize = 8;

/// Verifies, trains, kills, resumes, reshards and generates.
pub fn run(programs: &Programs) -> Result<(), String> {
    let folder = TempDir::new("conv-lm").map_err(|e| format!("a temporary folder: {e}"))?;
    let example = Example {
        programs,
        runs: folder.path(),
    };
    run_command(&mut example.command(&["verify"]))?;
    let save = ["--save-every", "4"];
    example.pretrain("whole", &save)?;
    let whole = losses_in(&example.run_dir("whole"))?;
    check_losses(&whole, STEPS)?;
    example.kill("killed", &save)?;
    example.pretrain("killed", &["--resume", "auto"])?;
    // The log contains the six steps until the run was killed, and the steps since the checkpoint of step 4.
    let resumed = losses_in(&example.run_dir("killed"))?;
    if resumed != [&whole[..6], &whole[4..]].concat() {
        return Err(format!("killed and resumed: {resumed:?}, not {whole:?}"));
    }
    example.reshard(&whole[STEPS / 2..])?;
    example.generate()
}

struct Example<'a> {
    programs: &'a Programs<'a>,
    runs: &'a Path,
}

impl Example<'_> {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.programs.command("conv_lm");
        command.args(args);
        command
    }

    fn run_dir(&self, name: &str) -> PathBuf {
        self.runs.join(name)
    }

    fn pretrain_command(&self, name: &str, flags: &[&str]) -> Command {
        let steps = STEPS.to_string();
        let mut command = self.command(&["pretrain", "--steps", &steps, "--run-dir"]);
        command.arg(self.run_dir(name)).args(flags);
        command
    }

    fn pretrain(&self, name: &str, flags: &[&str]) -> Result<(), String> {
        run_command(&mut self.pretrain_command(name, flags))
    }

    /// Trains until the process is killed in step 7, after the checkpoint of step 4.
    fn kill(&self, name: &str, flags: &[&str]) -> Result<(), String> {
        let fault = ["--inject", "kill@rank=1,step=7,call=0"];
        let mut command = self.pretrain_command(name, &[flags, &fault].concat());
        let status = command.status().map_err(|e| format!("{command:?}: {e}"))?;
        if status.code().is_some() {
            return Err(format!("the run was not killed: {status}"));
        }
        Ok(())
    }

    /// Continues the checkpoint of step 4 in another layout, with nearly the same losses, and changes its files.
    fn reshard(&self, expected: &[f64]) -> Result<(), String> {
        let checkpoint = self.run_dir("whole/checkpoints/step-00000004");
        let checkpoint = checkpoint.to_string_lossy();
        let other = ["--dp", "2", "--tp", "1", "--pp", "2", "--zero-stage", "1"];
        self.pretrain("other", &[&other[..], &["--resume", &checkpoint]].concat())?;
        let found = losses_in(&self.run_dir("other"))?;
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs();
        if found.len() != expected.len() || !found.iter().zip(expected).all(is_near) {
            return Err(format!("in another layout: {found:?}, not {expected:?}"));
        }
        let files = self.run_dir("one-file");
        let files = files.to_string_lossy();
        let reshard = ["checkpoint", "reshard", &checkpoint, &files];
        run_command(&mut self.command(&reshard))?;
        run_command(&mut self.command(&["checkpoint", "diff", &checkpoint, &files]))
    }

    /// Checks that one rank and two tensor ranks generate the same text.
    fn generate(&self) -> Result<(), String> {
        let model = self.run_dir("killed");
        let model = model.to_string_lossy();
        let text = |tensor: &str| {
            let mut lines = vec![];
            let flags = [
                "generate",
                "--model",
                &model,
                "--prompt",
                "pub fn ",
                "--max-tokens",
                "40",
            ];
            let mut command = self.command(&flags);
            command.args(["--tp", tensor]);
            read_quietly(&mut command, |line| lines.push(line.to_string()))?;
            Ok::<_, String>(lines.join("\n"))
        };
        let (one, two) = (text("1")?, text("2")?);
        if one != two || one.len() <= "pub fn ".len() {
            return Err(format!(
                "one rank generated {one:?}, two tensor ranks {two:?}"
            ));
        }
        println!("{one}");
        Ok(())
    }
}
