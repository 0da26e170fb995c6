//! How much memory the processes of this machine can have, and whether a run fits.
//!
//! What is compared is a bound from below: parameters, gradients, optimizer state and the logits of one
//! micro-batch. Activations are not in it, so that a run that is let through may still be too large, and one
//! that is refused is too large for certain.

use std::fs;
use std::path::{Path, PathBuf};

use super::{MemoryPlan, human};

/// What the ranks of a run hold at once, at the least, in bytes of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Parameters, and tables of positions.
    pub parameters: u128,
    /// Sums of gradients.
    pub gradients: u128,
    /// Masters and moments.
    pub optimizer: u128,
    /// The logits of one micro-batch.
    pub logits: u128,
}

impl Need {
    /// What one rank holds at once: at the end of a backward, or when it has the logits of a micro-batch.
    ///
    /// `is_first` says that the logits are those of the first micro-batch of a step alone, when there are no
    /// gradients yet, and `is_only` that no step comes before, when the optimizer has no state yet.
    pub fn new(state: &MemoryPlan, logits: u128, is_first: bool, is_only: bool) -> Self {
        let stepping = Self {
            parameters: state.parameters.into(),
            gradients: state.gradients.into(),
            optimizer: state.optimizer.into(),
            logits: 0,
        };
        let unless = |is_not: bool, bytes: u128| if is_not { 0 } else { bytes };
        let forward = Self {
            gradients: unless(is_first, stepping.gradients),
            optimizer: unless(is_only, stepping.optimizer),
            logits,
            ..stepping
        };
        match forward.total() > stepping.total() {
            true => forward,
            false => stepping,
        }
    }

    /// All kinds.
    pub fn total(&self) -> u128 {
        let kinds = [self.parameters, self.gradients, self.optimizer, self.logits];
        kinds.into_iter().fold(0, u128::saturating_add)
    }

    /// What several ranks hold together.
    pub fn sum(needs: impl IntoIterator<Item = Self>) -> Self {
        needs.into_iter().fold(Self::default(), |sum, need| Self {
            parameters: sum.parameters.saturating_add(need.parameters),
            gradients: sum.gradients.saturating_add(need.gradients),
            optimizer: sum.optimizer.saturating_add(need.optimizer),
            logits: sum.logits.saturating_add(need.logits),
        })
    }

    /// Checks that it fits.
    ///
    /// # Errors
    ///
    /// [`TooLarge`] where it does not; never where the limit is not known.
    pub fn check(&self, limit: Option<Limit>) -> Result<(), TooLarge> {
        match limit {
            Some(limit) if self.total() > limit.bytes.into() => {
                Err(TooLarge { need: *self, limit })
            }
            _ => Ok(()),
        }
    }
}

/// The most that processes can have, with swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The bytes.
    pub bytes: u64,
    /// Whose they are: `this machine`.
    pub of: &'static str,
}

/// A run that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the run needs at least {} of memory ({} parameters, {} gradients, {} optimizer state, {} logits), and {} \
     has {} with its swap; a smaller model or micro-batch, a higher ZeRO stage or more machines need less of it",
    bytes(.need.total()),
    bytes(.need.parameters),
    bytes(.need.gradients),
    bytes(.need.optimizer),
    bytes(.need.logits),
    .limit.of,
    human(.limit.bytes)
)]
pub struct TooLarge {
    /// What the ranks hold.
    pub need: Need,
    /// What there is.
    pub limit: Limit,
}

fn bytes(bytes: u128) -> String {
    human(u64::try_from(bytes).unwrap_or(u64::MAX))
}

/// The memory of this machine, and that of the cgroup of this process, as Linux tells it; nothing where
/// it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Of all processes of the machine.
    pub machine: Option<Limit>,
    /// Of this process and what shares its cgroup.
    pub cgroup: Option<Limit>,
}

impl Memory {
    /// Asks the system.
    pub fn read() -> Self {
        Self::below(Path::new("/"))
    }

    /// What the files below `root` say.
    fn below(root: &Path) -> Self {
        let Some((memory, swap)) = machine(root) else {
            return Self::default();
        };
        let limit = |bytes, of| Limit { bytes, of };
        Self {
            machine: Some(limit(memory.saturating_add(swap), "this machine")),
            cgroup: cgroup(root, swap).map(|bytes| limit(bytes, "the cgroup of this process")),
        }
    }
}

/// The memory and the swap of `/proc/meminfo`.
fn machine(root: &Path) -> Option<(u64, u64)> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some((value("MemTotal:")?, value("SwapTotal:").unwrap_or(0)))
}

/// The least limit of the cgroups that the process is in, of either version.
fn cgroup(root: &Path, swap: u64) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let limits = text.lines().filter_map(|line| {
        // `0::/path`, or `4:memory:/path`.
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let mounted = root.join("sys/fs/cgroup");
        let path = Path::new(path).strip_prefix("/").ok()?;
        match controllers {
            "" => levels(&mounted, path)
                .filter_map(|folder| {
                    let memory = number(&folder.join("memory.max"))?;
                    let own_swap = number(&folder.join("memory.swap.max"));
                    Some(memory.saturating_add(own_swap.unwrap_or(swap).min(swap)))
                })
                .min(),
            _ if controllers.split(',').any(|name| name == "memory") => {
                levels(&mounted.join("memory"), path)
                    .filter_map(|folder| {
                        let with_swap = number(&folder.join("memory.memsw.limit_in_bytes"));
                        let memory = number(&folder.join("memory.limit_in_bytes"))?;
                        let memory = memory.saturating_add(swap);
                        Some(with_swap.map_or(memory, |with_swap| with_swap.min(memory)))
                    })
                    .min()
            }
            _ => None,
        }
    });
    limits.min()
}

/// A cgroup and those that it lies in, as far as they can be seen from here.
fn levels(mounted: &Path, path: &Path) -> impl Iterator<Item = PathBuf> {
    path.ancestors()
        .map(|path| mounted.join(path))
        .collect::<Vec<_>>()
        .into_iter()
}

/// The number in a file; none for `max`.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
