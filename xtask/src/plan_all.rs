//! `cargo xtask plan-all`: plans every published recipe on many devices.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;

use crate::process::{cargo, run as run_command, target_folder};
use crate::report::Report;

/// The options of `cargo xtask plan-all`.
#[derive(Args)]
pub struct Options {
    /// Plan only recipes whose name contains this text.
    #[arg(long, value_name = "PART", default_value = "")]
    recipe: String,
    /// Plan only for devices whose name contains this text, as in 64xH100.
    #[arg(long, value_name = "PART", default_value = "")]
    devices: String,
}

/// The devices that each recipe is planned on.
const DEVICES: [&str; 8] = [
    "8xH100",
    "64xH100",
    "256xH100",
    "1024xH100",
    "256xA100",
    "256xH200",
    "256xB200",
    "256xMI300X",
];

/// The valid exit codes of a plan: 0 if a layout fits, 1 if no layout fits.
const CODES: [i32; 2] = [0, 1];

/// A recipe on devices.
struct Case {
    recipe: String,
    devices: &'static str,
}

/// The result of a case.
struct Planned {
    /// The best layout, or the message that no layout fits.
    layout: String,
    /// Seconds per step.
    step: String,
    /// GiB per rank.
    memory: String,
}

/// Builds the command, plans every case, and prints a table.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    let mut cases = vec![];
    report.step("programs", || {
        let build = ["build", "--release", "-p", "burn-megatron-cli"];
        run_command(&mut cargo(root, &build))?;
        cases = all(options, root)?;
        Ok::<_, String>(())
    });
    report.step("plans", || {
        let program = target_folder(root)?.join("release/burn-megatron");
        plan_all(&cases, root, &program)
    });
}

/// Returns the cases of the published recipes on all devices. A published recipe states its plan in a comment.
fn all(options: &Options, root: &Path) -> Result<Vec<Case>, String> {
    let folder = root.join("examples/recipes");
    let text =
        |path: &Path| fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()));
    let files = fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut recipes = vec![];
    for file in files {
        let path = file
            .map_err(|e| format!("{}: {e}", folder.display()))?
            .path();
        if text(&path)?.contains("\n# Plan:") {
            let name = path.file_stem().unwrap_or_default();
            recipes.push(name.to_string_lossy().into_owned());
        }
    }
    recipes.sort();
    recipes.retain(|name| name.contains(&options.recipe));
    let devices = || {
        DEVICES
            .into_iter()
            .filter(|it| it.contains(&options.devices))
    };
    let of_recipe = |recipe: &String| {
        let recipe = recipe.clone();
        devices().map(move |devices| Case {
            recipe: recipe.clone(),
            devices,
        })
    };
    let cases: Vec<_> = recipes.iter().flat_map(of_recipe).collect();
    if cases.is_empty() {
        return Err("no case has these parts in its name".into());
    }
    Ok(cases)
}

fn plan_all(cases: &[Case], root: &Path, program: &Path) -> Result<(), String> {
    let (mut rows, mut failed) = (vec![], 0);
    for (number, case) in (1..).zip(cases) {
        let start = Instant::now();
        let planned = case.plan(root, program);
        let took = start.elapsed();
        let row = case.row(&planned, took);
        println!("[{number}/{}] {row}", cases.len());
        failed += usize::from(planned.is_err());
        rows.push(row);
    }
    println!("\n{}\n{}", head(), rows.join("\n"));
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} of {} cases failed", cases.len())),
    }
}

fn head() -> String {
    line(["recipe", "devices", "took", "step", "memory", "layout"])
}

fn line(cells: [&str; 6]) -> String {
    let [recipe, devices, took, step, memory, layout] = cells;
    format!("{recipe:<18} {devices:<11} {took:>8} {step:>10} {memory:>10}  {layout}")
}

impl Case {
    fn plan(&self, root: &Path, program: &Path) -> Result<Planned, String> {
        let mut command = Command::new(program);
        let recipe = format!("examples/recipes/{}.toml", self.recipe);
        command
            .current_dir(root)
            .args(["plan", "--json", "--top", "1"]);
        command.args(["--recipe", &recipe, "--devices", self.devices]);
        let output = command.output().map_err(|e| e.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (json, messages) = (text(&output.stdout), text(&output.stderr));
        let code = output.status.code();
        if !code.is_some_and(|code| CODES.contains(&code)) || messages.contains("panicked") {
            return Err(format!("{}: {}", output.status, messages.trim()));
        }
        let json: Value = serde_json::from_str(&json)
            .map_err(|error| format!("{}: {error}: {}", output.status, messages.trim()))?;
        Planned::read(&json)
    }

    fn row(&self, planned: &Result<Planned, String>, took: Duration) -> String {
        let took = format!("{:.1} s", took.as_secs_f64());
        let of =
            |step, memory, layout| line([&self.recipe, self.devices, &took, step, memory, layout]);
        match planned {
            Ok(plan) => of(&plan.step, &plan.memory, &plan.layout),
            Err(error) => of("-", "-", &format!("FAILED: {error}")),
        }
    }
}

impl Planned {
    /// Reads the best plan, or the plan that needs the least memory.
    fn read(json: &Value) -> Result<Self, String> {
        let best = json["plans"].get(0);
        let plan = best.unwrap_or(&json["nearest"]);
        let text = |name: &str| {
            plan[name]
                .as_str()
                .ok_or("the output has neither a plan nor a nearest plan")
        };
        let number = |name: &str| plan[name].as_f64().unwrap_or(f64::NAN);
        let layout = text("layout")?;
        Ok(Self {
            layout: match best {
                Some(_) => layout.into(),
                None => format!("no layout fits; the smallest is {layout}"),
            },
            step: format!("{:.3} s", number("seconds")),
            memory: format!("{:.1} GiB", number("memory_total") / (1u64 << 30) as f64),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_has_the_best_plan_or_the_smallest() {
        let plan = json!({ "layout": "dp8", "seconds": 1.5, "memory_total": 3u64 << 30 });
        let best = Planned::read(&json!({ "plans": [plan], "nearest": null })).unwrap();
        assert_eq!(
            (&*best.layout, &*best.step, &*best.memory),
            ("dp8", "1.500 s", "3.0 GiB")
        );
        let nearest = Planned::read(&json!({ "plans": [], "nearest": plan })).unwrap();
        assert_eq!(nearest.layout, "no layout fits; the smallest is dp8");
        assert!(Planned::read(&json!({ "plans": [], "nearest": null })).is_err());
    }

    #[test]
    fn the_published_recipes_are_found() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let options = |recipe: &str, devices: &str| Options {
            recipe: recipe.into(),
            devices: devices.into(),
        };
        assert_eq!(
            all(&options("", ""), &root).unwrap().len(),
            17 * DEVICES.len()
        );
        assert_eq!(all(&options("llama-3-8b", "64x"), &root).unwrap().len(), 1);
        assert!(all(&options("none", ""), &root).is_err());
    }
}
