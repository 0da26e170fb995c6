//! Checks whether a run fits into the memory that is available to the processes of this machine.
//!
//! The check uses a lower bound of the required memory. This lower bound is the memory of parameters, gradients,
//! optimizer state, and the logits of one micro-batch or chunk. Activations are not included. A run that passes the
//! check may still need too much memory, but a run that fails the check certainly needs too much memory.

use std::fs;
use std::path::{Path, PathBuf};

use super::{MemoryPlan, format_bytes};

/// A lower bound of the memory that ranks need at the same time, in bytes by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequiredMemory {
    /// The bytes of parameters and position tables.
    pub parameters: u128,
    /// The bytes of gradient sums.
    pub gradients: u128,
    /// The bytes of master weights and moments, including master weights and moments in host memory.
    pub optimizer: u128,
    /// The bytes of the logits of one micro-batch, or of a chunk of a micro-batch.
    pub logits: u128,
}

impl RequiredMemory {
    /// Computes the host memory that one rank on a CPU device needs at the same time. It is the maximum of two amounts:
    /// the memory at the end of a backward, and the memory while the logits of a micro-batch exist.
    ///
    /// `is_first` is true if a step has a single micro-batch. In this case, no gradients are allocated while the logits
    /// exist. `is_only` is true if the run has a single step. In this case, no optimizer state is allocated while the
    /// logits exist.
    pub fn new(state: &MemoryPlan, logits: u128, is_first: bool, is_only: bool) -> Self {
        let stepping = Self {
            parameters: state.parameters.into(),
            gradients: state.gradients.into(),
            optimizer: u128::from(state.optimizer) + u128::from(state.host_optimizer),
            logits: 0,
        };
        let unless = |is_not: bool, bytes: u128| if is_not { 0 } else { bytes };
        let forward = Self {
            gradients: unless(is_first, stepping.gradients),
            optimizer: unless(is_only, stepping.optimizer),
            logits,
            ..stepping
        };
        if forward.total() > stepping.total() {
            forward
        } else {
            stepping
        }
    }

    /// Returns the required memory as the sum of all categories, in bytes.
    pub fn total(&self) -> u128 {
        let kinds = [self.parameters, self.gradients, self.optimizer, self.logits];
        kinds.into_iter().fold(0, u128::saturating_add)
    }

    /// Returns the sum of the required memory of several ranks, by category.
    pub fn sum(needs: impl IntoIterator<Item = Self>) -> Self {
        needs.into_iter().fold(Self::default(), |sum, need| Self {
            parameters: sum.parameters.saturating_add(need.parameters),
            gradients: sum.gradients.saturating_add(need.gradients),
            optimizer: sum.optimizer.saturating_add(need.optimizer),
            logits: sum.logits.saturating_add(need.logits),
        })
    }

    /// Checks that the required memory does not exceed `limit`.
    ///
    /// # Errors
    ///
    /// [`InsufficientMemory`] if the required memory exceeds `limit`. If the limit is unknown (`None`), the check
    /// succeeds.
    pub fn check(&self, limit: Option<MemoryLimit>) -> Result<(), InsufficientMemory> {
        match limit {
            Some(limit) if self.total() > limit.bytes.into() => {
                Err(InsufficientMemory { need: *self, limit })
            }
            _ => Ok(()),
        }
    }
}

/// A limit of the memory of one or more processes, including swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit in bytes.
    pub bytes: u64,
    /// A description of the scope of the limit, such as `this machine`.
    pub of: &'static str,
}

/// A run needs more memory than is available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the run needs at least {} of memory ({} parameters, {} gradients, {} optimizer state, {} logits), but {} \
     has {} including swap; use a smaller model or micro-batch, a higher ZeRO stage or more machines",
    bytes(.need.total()),
    bytes(.need.parameters),
    bytes(.need.gradients),
    bytes(.need.optimizer),
    bytes(.need.logits),
    .limit.of,
    format_bytes(.limit.bytes)
)]
pub struct InsufficientMemory {
    /// The memory that the ranks need.
    pub need: RequiredMemory,
    /// The limit.
    pub limit: MemoryLimit,
}

fn bytes(bytes: u128) -> String {
    format_bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
}

/// The memory limits of this machine and of the cgroup of this process, as reported by Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// The limit of all processes of the machine, or `None` if it is unknown.
    pub machine: Option<MemoryLimit>,
    /// The limit of this process and the other processes in its cgroup, or `None` if it is unknown.
    pub cgroup: Option<MemoryLimit>,
}

impl HostMemory {
    /// Reads the memory limits of this machine and of the cgroup of this process.
    pub fn read() -> Self {
        Self::read_under(Path::new("/"))
    }

    /// Reads the limits from the files under `root`.
    fn read_under(root: &Path) -> Self {
        let Some((memory, swap)) = meminfo(root) else {
            return Self::default();
        };
        let limit = |bytes, of| MemoryLimit { bytes, of };
        Self {
            machine: Some(limit(memory.saturating_add(swap), "this machine")),
            cgroup: cgroup(root, swap).map(|bytes| limit(bytes, "the cgroup of this process")),
        }
    }
}

/// Returns the memory and the swap in `/proc/meminfo`, in bytes.
fn meminfo(root: &Path) -> Option<(u64, u64)> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some((value("MemTotal:")?, value("SwapTotal:").unwrap_or(0)))
}

/// Returns the smallest limit of the cgroups of the process, for cgroup v1 or v2.
fn cgroup(root: &Path, swap: u64) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let limits = text.lines().filter_map(|line| {
        // The line is `0::/path` or `4:memory:/path`.
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let mounted = root.join("sys/fs/cgroup");
        let path = Path::new(path).strip_prefix("/").ok()?;
        match controllers {
            "" => cgroup_and_ancestors(&mounted, path)
                .filter_map(|folder| {
                    let memory = read_number(&folder.join("memory.max"))?;
                    let own_swap = read_number(&folder.join("memory.swap.max"));
                    Some(memory.saturating_add(own_swap.unwrap_or(swap).min(swap)))
                })
                .min(),
            _ if controllers.split(',').any(|name| name == "memory") => {
                cgroup_and_ancestors(&mounted.join("memory"), path)
                    .filter_map(|folder| {
                        let with_swap = read_number(&folder.join("memory.memsw.limit_in_bytes"));
                        let memory = read_number(&folder.join("memory.limit_in_bytes"))?;
                        let total = memory.saturating_add(swap);
                        Some(with_swap.map_or(total, |with_swap| with_swap.min(total)))
                    })
                    .min()
            }
            _ => None,
        }
    });
    limits.min()
}

/// Returns the folders of a cgroup and of its ancestors, as far as they are visible.
fn cgroup_and_ancestors(mounted: &Path, path: &Path) -> impl Iterator<Item = PathBuf> {
    path.ancestors()
        .map(|path| mounted.join(path))
        .collect::<Vec<_>>()
        .into_iter()
}

/// Returns the number in a file, or `None` for `max`.
fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
#[path = "host_memory_tests.rs"]
mod tests;
