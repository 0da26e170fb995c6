//! CPUs available to the ranks on GPUs.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::device::DeviceKind;

use crate::ranks::RankSetup;

/// The number of threads of a rank on a GPU that are busy at once: the rank, CubeCL's device thread, NCCL's worker,
/// and NCCL's own threads. A thread that waits for a CPU delays each batch of launches by up to 4 ms.
const CPUS_PER_RANK: f64 = 4.0;

/// Variables of launchers that bind each rank to its own CPUs.
const BINDING_LAUNCHERS: [&str; 3] = ["SLURM_CPUS_PER_TASK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"];

/// Warns if the ranks on CUDA devices have fewer CPUs than they keep busy. The warning is printed once per machine.
pub fn warn_if_few(device: DeviceKind, ranks: &RankSetup) {
    if device != DeviceKind::Cuda || ranks.local_rank > 0 {
        return;
    }
    let is_bound = BINDING_LAUNCHERS
        .iter()
        .any(|name| env::var_os(name).is_some());
    let is_bound = is_bound && ranks.own_rank.is_some();
    let shortage = Cpus::read().and_then(|cpus| cpus.shortage(ranks.on_this_machine, is_bound));
    if let Some(shortage) = shortage {
        tracing::warn!("{shortage}");
    }
}

/// CPUs that this process may use.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cpus {
    /// The number of CPUs in the affinity mask.
    affinity: usize,
    /// The number of CPUs of the cgroup quota, if there is a quota.
    quota: Option<f64>,
}

impl Cpus {
    /// Reads the CPUs of this process. Returns `None` if they are unknown.
    fn read() -> Option<Self> {
        Some(Self {
            affinity: affinity()?,
            quota: quota(Path::new("/")),
        })
    }

    /// Returns the number of CPUs per rank, for `ranks` ranks on this machine. All ranks share the quota. They also
    /// share the affinity mask, unless each rank is bound to its own CPUs.
    fn per_rank(self, ranks: usize, is_bound: bool) -> f64 {
        let ranks = ranks.max(1) as f64;
        let affinity = self.affinity as f64;
        let own = if is_bound { affinity } else { affinity / ranks };
        own.min(self.quota.map_or(f64::INFINITY, |quota| quota / ranks))
    }

    /// Returns the warning if there are too few CPUs.
    fn shortage(self, ranks: usize, is_bound: bool) -> Option<String> {
        let own = self.per_rank(ranks, is_bound);
        let quota = self
            .quota
            .map_or("none".into(), |quota| format!("{quota:.1} CPUs"));
        (own < CPUS_PER_RANK).then(|| {
            format!(
                "a rank on a GPU keeps {CPUS_PER_RANK} CPUs busy, and each of {ranks} ranks of this machine has {own:.1} \
                 (affinity: {} CPUs, cgroup quota: {quota}): the GPU may wait for the host; give the job more CPUs",
                self.affinity
            )
        })
    }
}

#[cfg(target_os = "linux")]
fn affinity() -> Option<usize> {
    // SAFETY: the set is plain memory of the passed size, and the call fills it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let code = libc::sched_getaffinity(0, size_of_val(&set), &mut set);
        (code == 0).then(|| libc::CPU_COUNT(&set) as usize)
    }
}

#[cfg(not(target_os = "linux"))]
fn affinity() -> Option<usize> {
    None
}

/// Returns the smallest CPU quota of the cgroups (v1 or v2) of this process, from the files under `root`.
fn quota(root: &Path) -> Option<f64> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounted = root.join("sys/fs/cgroup");
    let quotas = text.lines().flat_map(|line| {
        // `0::/path`, or `4:cpu,cpuacct:/path`.
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
        let path = Path::new(path.trim_start_matches('/'));
        let folders = |mounted: PathBuf, read: fn(&Path) -> Option<f64>| {
            let ancestors = path.ancestors().map(|path| mounted.join(path));
            ancestors
                .filter_map(|folder| read(&folder))
                .collect::<Vec<_>>()
        };
        match controllers {
            "" => folders(mounted.clone(), quota_of_v2),
            _ if controllers.split(',').any(|name| name == "cpu") => {
                folders(mounted.join("cpu"), quota_of_v1)
            }
            _ => vec![],
        }
    });
    quotas.reduce(f64::min)
}

/// Reads `cpu.max`: `QUOTA PERIOD`, where the quota may be `max`.
fn quota_of_v2(folder: &Path) -> Option<f64> {
    let text = fs::read_to_string(folder.join("cpu.max")).ok()?;
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota, period)
}

/// Reads `cpu.cfs_quota_us`, which is -1 without a quota, and `cpu.cfs_period_us`.
fn quota_of_v1(folder: &Path) -> Option<f64> {
    let read = |name| fs::read_to_string(folder.join(name)).ok();
    ratio(
        read("cpu.cfs_quota_us")?.trim(),
        read("cpu.cfs_period_us")?.trim(),
    )
}

fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_quota_and_the_affinity_mask() {
        let cpus = |affinity, quota| Cpus { affinity, quota };
        assert_eq!(cpus(64, None).per_rank(8, false), 8.0);
        assert_eq!(cpus(64, Some(16.0)).per_rank(8, false), 2.0);
        // A launcher that binds ranks gives each rank its own mask.
        assert_eq!(cpus(8, None).per_rank(8, true), 8.0);
        assert_eq!(cpus(8, Some(16.0)).per_rank(8, true), 2.0);
        assert_eq!(cpus(32, None).shortage(8, false), None);
        let warning = cpus(64, Some(30.0)).shortage(8, false).unwrap();
        for text in [
            "keeps 4 CPUs busy",
            "each of 8 ranks",
            "has 3.8",
            "64 CPUs",
            "30.0 CPUs",
        ] {
            assert!(warning.contains(text), "{warning}");
        }
    }

    #[test]
    fn the_smallest_quota_of_a_cgroup_and_its_ancestors_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let quota = || quota(root.path());
        assert_eq!(quota(), None);
        write("proc/self/cgroup", "0::/pod/container\n");
        write("sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
        assert_eq!(quota(), None);
        write("sys/fs/cgroup/pod/cpu.max", "1600000 100000\n");
        assert_eq!(quota(), Some(16.0));
        write("sys/fs/cgroup/pod/container/cpu.max", "250000 100000\n");
        assert_eq!(quota(), Some(2.5));
        write("proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/job\n");
        write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
        write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
        assert_eq!(quota(), None);
        write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "800000\n");
        assert_eq!(quota(), Some(8.0));
    }
}
