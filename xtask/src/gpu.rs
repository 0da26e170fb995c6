//! `cargo xtask gpu`: runs all measurements on the NVIDIA GPU of this machine.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::process::run as run_command;
use crate::report::Report;
use crate::{emulate, gpu_kit};

/// The output folder, and the measurements to run.
#[derive(Args)]
pub struct Options {
    /// Folder for the report, the archive and the results of the suites. The folder is created.
    #[arg(long, value_name = "DIR", default_value = "gpu-results")]
    out: PathBuf,
    /// Run only the kit, without the suites of `emulate`.
    #[arg(long)]
    no_suites: bool,
}

/// The file for the results of the suites, next to the report of the kit.
const SUITES: &str = "suites.txt";

/// Runs the kit of `gpu-kit`, and then the suites of `emulate` on the GPU.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    report.step("gpu kit", || {
        let program = emulate::build_command_for_cuda(root)?;
        let kit = gpu_kit::stage(root, &program, &[])?;
        let mut script = emulate::command_on_gpu(Path::new("bash"), root);
        script.arg(kit.join("gpu-kit.sh")).env("OUT", &options.out);
        run_command(&mut script)
    });
    if options.no_suites {
        return;
    }
    emulate::run_on_gpu(root, report);
    let text = report.text();
    report.step("report", || {
        let path = options.out.join(SUITES);
        let failed = |error| format!("{}: {error}", path.display());
        fs::create_dir_all(&options.out).map_err(failed)?;
        fs::write(&path, &text).map_err(failed)?;
        println!("please send {} with the archive", path.display());
        Ok::<_, String>(())
    });
}
