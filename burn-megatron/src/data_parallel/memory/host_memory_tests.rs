use super::*;

const GIB: u64 = 1 << 30;

/// Returns the limits of a system with these files.
fn memory(files: &[(&str, &str)]) -> HostMemory {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    HostMemory::read_under(root.path())
}

const MEMINFO: (&str, &str) = (
    "proc/meminfo",
    "MemTotal:       16777216 kB\nMemFree:         1 kB\nSwapCached:    7 kB\nSwapTotal:       2097152 kB\n",
);

#[test]
fn the_machine_has_its_memory_and_its_swap() {
    let found = memory(&[MEMINFO]);
    assert_eq!(found.machine.unwrap().bytes, 18 * GIB);
    assert_eq!(found.cgroup, None);
    assert_eq!(memory(&[]), HostMemory::default());
    assert_eq!(
        memory(&[("proc/meminfo", "MemTotal: lots")]),
        HostMemory::default()
    );
}

#[test]
fn the_least_cgroup_counts_in_version_2() {
    let own = ("proc/self/cgroup", "0::/jobs/7\n");
    let found = |files: &[(&str, &str)]| {
        let found = memory(&[&[MEMINFO, own], files].concat());
        found.cgroup.map(|limit| limit.bytes)
    };
    assert_eq!(found(&[("sys/fs/cgroup/jobs/7/memory.max", "max\n")]), None);
    assert_eq!(
        found(&[("sys/fs/cgroup/jobs/7/memory.max", "4294967296\n")]),
        Some(6 * GIB)
    );
    let outer = ("sys/fs/cgroup/jobs/memory.max", "3221225472");
    let inner = ("sys/fs/cgroup/jobs/7/memory.max", "max");
    assert_eq!(found(&[outer, inner]), Some(5 * GIB));
    let no_swap = ("sys/fs/cgroup/jobs/memory.swap.max", "0");
    assert_eq!(found(&[outer, inner, no_swap]), Some(3 * GIB));
    // In a container the path is the path on the host, and the limit is at the root.
    assert_eq!(
        found(&[("sys/fs/cgroup/memory.max", "1073741824")]),
        Some(3 * GIB)
    );
}

#[test]
fn the_least_cgroup_counts_in_version_1() {
    let own = (
        "proc/self/cgroup",
        "9:cpu,cpuacct:/other\n4:hugetlb,memory:/jobs/7\n0::/\n",
    );
    let none = (
        "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes",
        "9223372036854771712\n",
    );
    let outer = (
        "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes",
        "4294967296",
    );
    let both = (
        "sys/fs/cgroup/memory/jobs/memory.memsw.limit_in_bytes",
        "5368709120",
    );
    let found = |files: &[(&str, &str)]| {
        let found = memory(&[&[MEMINFO, own], files].concat());
        found.cgroup.map(|limit| limit.bytes)
    };
    assert_eq!(found(&[]), None);
    assert!(found(&[none]).unwrap() > 1 << 62);
    assert_eq!(found(&[none, outer]), Some(6 * GIB));
    assert_eq!(found(&[none, outer, both]), Some(5 * GIB));
}

#[test]
fn the_peak_is_at_the_end_of_backward_or_with_the_logits() {
    let state = MemoryPlan {
        parameters: 4,
        gradients: 5,
        optimizer: 5,
        host_optimizer: 3,
        buffers: 100,
    };
    let kinds =
        |need: RequiredMemory| [need.parameters, need.gradients, need.optimizer, need.logits];
    let need = |logits, first, only| kinds(RequiredMemory::new(&state, logits, first, only));
    assert_eq!(need(3, false, false), [4, 5, 8, 3]);
    assert_eq!(
        need(3, true, false),
        [4, 5, 8, 0],
        "gradients come when the logits are gone"
    );
    assert_eq!(need(6, true, false), [4, 0, 8, 6]);
    assert_eq!(need(6, true, true), [4, 5, 8, 0]);
    assert_eq!(need(20, true, true), [4, 0, 0, 20]);
}

#[test]
fn insufficient_memory_is_refused_with_the_sum() {
    let need = RequiredMemory {
        parameters: 6 * u128::from(GIB),
        gradients: 6 * u128::from(GIB),
        optimizer: 12 * u128::from(GIB),
        logits: u128::from(GIB) / 2,
    };
    let limit = |bytes| {
        Some(MemoryLimit {
            bytes,
            of: "this machine",
        })
    };
    let total = u64::try_from(need.total()).unwrap();
    assert_eq!(need.check(limit(total)), Ok(()));
    assert_eq!(need.check(None), Ok(()));
    insta::assert_snapshot!(
        need.check(limit(total - 1)).unwrap_err(),
        @"the run needs at least 24.50 GiB of memory (6.00 GiB parameters, 6.00 GiB gradients, 12.00 GiB \
          optimizer state, 512.00 MiB logits), but this machine has 24.50 GiB including swap; use a smaller \
          model or micro-batch, a higher ZeRO stage or more machines"
    );
    let most = RequiredMemory {
        logits: u128::MAX,
        ..need
    };
    assert!(
        RequiredMemory::sum([most, most])
            .check(limit(u64::MAX))
            .is_err()
    );
}

#[test]
fn this_machine_reports_its_memory() {
    let found = HostMemory::read();
    if cfg!(target_os = "linux") {
        assert!(found.machine.is_some_and(|limit| limit.bytes > 1 << 20));
    }
}
