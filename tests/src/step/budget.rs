//! The budgets of a step, and checks for steps that exceed them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::fs;
use std::path::Path;

use burn_megatron_kernel_check::bound::launch::{Limit, limits};
use burn_megatron_kernel_check::bound::{H100, Pipe};
use serde::Deserialize;

use super::StepReport;
use super::counts::Launch;

/// The number of instructions of a warp from which a launch must fill the GPU.
const LONG: f64 = 1e4;

/// The ratio of scalar time to memory time from which a launch should use tensor cores.
const SCALAR: f64 = 2.0;

/// The file of budgets.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budgets {
    /// Burn's kernels whose work may grow with the tokens, without types and sizes.
    pub allowed: BTreeSet<String>,
    /// The budgets by model name.
    pub models: BTreeMap<String, Budget>,
}

/// The limits of a step of a model.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Launches per layer, without products.
    pub launches_per_layer: f64,
    /// Bytes per layer, without products, in units of `[tokens, hidden]` with 16 bits.
    pub passes_per_layer: f64,
    /// The number of copies to the host.
    pub copies_to_host: usize,
    /// The number of copies to the device.
    pub copies_to_device: usize,
    /// The number of calls in which the host waits.
    pub waits: usize,
    /// The names of known failures. Each of them must still occur.
    #[serde(default)]
    pub known: BTreeSet<String>,
}

/// A violated limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The name without numbers, as in the list of known failures.
    pub name: String,
    /// The found value and the expected value.
    pub message: String,
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.message)
    }
}

impl Budgets {
    /// Reads the file.
    ///
    /// # Errors
    ///
    /// Returns an error if the text is not a valid list of budgets.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| format!("invalid budgets: {error}"))
    }

    /// Returns the failures of a step that are not known, and the known failures that no longer occur. `ours`
    /// contains the names of this project's kernels.
    ///
    /// # Errors
    ///
    /// Returns an error if the model has no budget.
    pub fn failures(
        &self,
        step: &StepReport,
        ours: &BTreeSet<String>,
    ) -> Result<Vec<Failure>, String> {
        let name = step.case.name;
        let budget = self.models.get(name);
        let budget = budget.ok_or_else(|| format!("the budgets have no model {name:?}"))?;
        let found = self.all_failures(step, budget, ours);
        let names: BTreeSet<_> = found.iter().map(|failure| &failure.name).collect();
        let mended = budget.known.iter().filter(|known| !names.contains(known));
        let mended = mended.map(|known| Failure {
            name: known.clone(),
            message: "is known to fail and passes: remove it from the known ones".into(),
        });
        let new = found
            .iter()
            .filter(|failure| !budget.known.contains(&failure.name));
        Ok(new.cloned().chain(mended).collect())
    }

    /// Returns all failures of a step, each name once.
    pub fn all_failures(
        &self,
        step: &StepReport,
        budget: &Budget,
        ours: &BTreeSet<String>,
    ) -> Vec<Failure> {
        let mut failures = over_budget(step, budget);
        let [one, two] = &step.counted;
        let counted = one.launches.iter().zip(&two.launches);
        for (launch, (one, two)) in step.two_layers.launches.iter().zip(counted) {
            failures.extend(idle(launch));
            failures.extend(scalar(launch));
            let mut free = ours.iter().chain(&self.allowed);
            let is_free = free.any(|name| is_instance(&launch.kernel, name));
            failures.extend((!is_free && grows(one, two)).then(|| {
                failure(
                    "foreign",
                    launch,
                    "is Burn's, grows with the tokens, and is not among the allowed kernels".into(),
                )
            }));
        }
        let mut seen = BTreeSet::new();
        failures.retain(|failure| seen.insert(failure.name.clone()));
        failures
    }
}

fn failure(what: &str, launch: &Launch, message: String) -> Failure {
    Failure {
        name: format!("{what}: {}", launch.kernel),
        message,
    }
}

/// Returns the numbers that exceed their budgets.
fn over_budget(step: &StepReport, budget: &Budget) -> Vec<Failure> {
    let (layer, counted) = (step.layer(), &step.counted[0]);
    let waits: usize = counted.waits.values().sum();
    let numbers = [
        (
            "launches per layer",
            layer.launches,
            budget.launches_per_layer,
        ),
        ("passes per layer", layer.passes, budget.passes_per_layer),
        (
            "copies to the host",
            counted.to_host as f64,
            budget.copies_to_host as f64,
        ),
        (
            "copies to the device",
            counted.to_device as f64,
            budget.copies_to_device as f64,
        ),
        ("waits", waits as f64, budget.waits as f64),
    ];
    // Passes are written with one decimal place.
    let over = numbers
        .into_iter()
        .filter(|(_, found, most)| *found > most + 0.05);
    over.map(|(name, found, most)| Failure {
        name: name.into(),
        message: format!("{found:.1}, expected at most {most:.1}"),
    })
    .collect()
}

/// Returns a failure if a long launch leaves multiprocessors idle.
fn idle(launch: &Launch) -> Option<Failure> {
    let (cubes, longest) = (launch.counts.cubes, launch.counts.longest_plane);
    let most = H100.multiprocessors;
    (cubes < most && longest > LONG).then(|| {
        failure(
            "idle",
            launch,
            format!(
                "{cubes:.0} cubes of at most {longest:.0} instructions of a warp: expected at least \
                 {most} cubes, or at most {LONG} instructions"
            ),
        )
    })
}

/// Returns a failure if a launch computes products without tensor cores.
fn scalar(launch: &Launch) -> Option<Failure> {
    let of = |wanted| {
        let mut limits = limits(&launch.counts, &H100).into_iter();
        limits
            .find(|(_, limit)| *limit == wanted)
            .map_or(0.0, |(seconds, _)| seconds)
    };
    let (floats, memory) = (of(Limit::Pipe(Pipe::Fma)), of(Limit::Memory));
    let long = launch.counts.longest_plane > LONG;
    (long && launch.counts.matrix_flops == 0.0 && floats > SCALAR * memory).then(|| {
        failure(
            "scalar",
            launch,
            format!(
                "{:.1} ms of scalar units, {:.1} ms of memory, and no matrix instruction",
                1e3 * floats,
                1e3 * memory
            ),
        )
    })
}

/// Returns whether a kernel has this name. CubeCL appends types and sizes, as in `name_x_bf16_n_8`.
fn is_instance(kernel: &str, name: &str) -> bool {
    let rest = kernel.strip_prefix(name);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

/// Returns whether a launch does more work for two rows than for one.
fn grows(one: &Launch, two: &Launch) -> bool {
    let more = |of: fn(&Launch) -> f64| of(two) > 1.01 * of(one);
    more(|launch| launch.instructions) || more(|launch| launch.counts.bytes)
}

/// Returns the names of the kernels in the sources of a crate: each function behind `#[cube(launch..)]`.
///
/// # Errors
///
/// Returns an error if a folder or file cannot be read, or if there is no kernel.
pub fn kernels_of(sources: &Path) -> Result<BTreeSet<String>, String> {
    let mut kernels = BTreeSet::new();
    let mut left = vec![sources.to_path_buf()];
    while let Some(path) = left.pop() {
        let failed = |error| format!("{}: {error}", path.display());
        if path.is_dir() {
            for entry in fs::read_dir(&path).map_err(failed)? {
                left.push(entry.map_err(failed)?.path());
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).map_err(failed)?;
            kernels.extend(kernels_in(&text).map(String::from));
        }
    }
    if kernels.is_empty() {
        return Err(format!("no kernel in {}", sources.display()));
    }
    Ok(kernels)
}

fn kernels_in(text: &str) -> impl Iterator<Item = &str> {
    text.split("#[cube(launch").skip(1).filter_map(|after| {
        let (_, name) = after.split_once("fn ")?;
        name.split(|c: char| !c.is_alphanumeric() && c != '_')
            .next()
    })
}
