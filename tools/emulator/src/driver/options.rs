//! The options in environment variables.

use std::path::PathBuf;
use std::{env, thread};

use crate::machine::{self, Checks};

const GIB: u64 = 1 << 30;

/// The options of this driver.
#[derive(Clone, Debug)]
pub(super) struct Options {
    /// The size of the device memory in bytes.
    pub memory: u64,
    /// Whether streams are lazy: work runs only when a call waits for it.
    pub lazy: bool,
    /// The file for the counts of each launch.
    pub counts: Option<PathBuf>,
    /// The folder for the text of each module.
    pub ptx: Option<PathBuf>,
    /// Whether the results of library products are [filled](crate::cublaslt) instead of computed.
    pub fill_products: bool,
    /// Whether all pairs of events have the same distance in time.
    pub fixed_clock: bool,
    /// The options for running kernels.
    pub machine: machine::Options,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            memory: 16 * GIB,
            lazy: false,
            counts: None,
            ptx: None,
            fill_products: false,
            fixed_clock: false,
            machine: machine::Options::default(),
        }
    }
}

impl Options {
    /// Reads the options from the environment. Invalid values are reported and ignored.
    pub fn from_environment() -> Self {
        Self::from(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from(variable: impl Fn(&str) -> Option<String>) -> Self {
        let mut options = Self::default();
        let wrong = |name: &str, value: &str| {
            super::errors::say(&format!("{name}={value} is not understood"));
        };
        let name = "BURN_MEGATRON_EMULATOR_MEMORY";
        if let Some(value) = variable(name) {
            match value.parse::<u64>() {
                Ok(gib) if gib > 0 && gib < 1 << 20 => options.memory = gib * GIB,
                _ => wrong(name, &value),
            }
        }
        // Each entry has the default value, the other value, and the setting of the other value.
        for (name, [usual, other], set) in [
            (
                "BURN_MEGATRON_EMULATOR_STREAMS",
                ["eager", "lazy"],
                &mut options.lazy,
            ),
            (
                "BURN_MEGATRON_EMULATOR_PRODUCTS",
                ["compute", "fill"],
                &mut options.fill_products,
            ),
            (
                "BURN_MEGATRON_EMULATOR_CLOCK",
                ["host", "fixed"],
                &mut options.fixed_clock,
            ),
        ] {
            match variable(name) {
                Some(value) if value == other => *set = true,
                Some(value) if value != usual => wrong(name, &value),
                _ => {}
            }
        }
        options.counts = variable("BURN_MEGATRON_EMULATOR_COUNTS").map(PathBuf::from);
        options.ptx = variable("BURN_MEGATRON_EMULATOR_PTX").map(PathBuf::from);
        options.machine.touched = options.counts.is_some();
        options.machine.threads = thread::available_parallelism().map_or(1, Into::into);
        let name = "BURN_MEGATRON_EMULATOR_THREADS";
        if let Some(value) = variable(name) {
            match value.parse() {
                Ok(threads) if threads > 0 => options.machine.threads = threads,
                _ => wrong(name, &value),
            }
        }
        let name = "BURN_MEGATRON_EMULATOR_CHECKS";
        if let Some(value) = variable(name) {
            match checks(&value) {
                Some(checks) => options.machine.checks = checks,
                None => wrong(name, &value),
            }
        }
        options
    }
}

/// Returns the checks in a list. All other checks are disabled.
fn checks(list: &str) -> Option<Checks> {
    let mut checks = Checks {
        races: false,
        lanes: false,
        unwritten: false,
        conflicts: false,
    };
    for name in list.split(',').filter(|name| *name != "none") {
        let check = match name {
            "races" => &mut checks.races,
            "lanes" => &mut checks.lanes,
            "unwritten" => &mut checks.unwritten,
            "conflicts" => &mut checks.conflicts,
            _ => return None,
        };
        *check = true;
    }
    Some(checks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_heeded_where_they_make_sense() {
        let options = Options::from(|name| match name {
            "BURN_MEGATRON_EMULATOR_MEMORY" => Some("3".into()),
            "BURN_MEGATRON_EMULATOR_STREAMS" => Some("lazy".into()),
            "BURN_MEGATRON_EMULATOR_PRODUCTS" => Some("fill".into()),
            "BURN_MEGATRON_EMULATOR_CLOCK" => Some("fixed".into()),
            "BURN_MEGATRON_EMULATOR_COUNTS" => Some("/counts".into()),
            "BURN_MEGATRON_EMULATOR_THREADS" => Some("5".into()),
            "BURN_MEGATRON_EMULATOR_CHECKS" => Some("lanes,races".into()),
            _ => None,
        });
        assert_eq!(options.memory, 3 * GIB);
        assert!(options.lazy && options.fill_products && options.fixed_clock);
        assert_eq!(options.counts, Some("/counts".into()));
        assert!(options.machine.touched);
        assert_eq!(options.machine.threads, 5);
        let wanted = options.machine.checks;
        assert!(wanted.lanes && wanted.races && !wanted.unwritten && !wanted.conflicts);
        let options = Options::from(|_| Some("0".into()));
        assert_eq!((options.memory, options.lazy), (16 * GIB, false));
        assert!(!options.fill_products && !options.fixed_clock);
        assert!(options.machine.threads > 0);
        assert_eq!(options.machine.checks, Checks::default());
        assert!(checks("none").is_some_and(|checks| !checks.races));
    }
}
