//! Upper bounds of the fraction of a device's copy bandwidth that a kernel can reach, computed from its machine code.
//!
//! The two upper bounds are not predictions. The first bound is the time of the [instructions](pipes). The second
//! bound is the time of [waiting](wait) for memory, since the registers limit the number of bytes in flight. Both are
//! computed over a [path](paths) through each innermost loop that streams, or through the whole kernel if no loop
//! streams. The slowest path counts.
//!
//! The counts of an emulated GPU for a whole launch give [lower bounds of its time](launch).
//!
//! Effects that machine code does not show are ignored: the tail of a launch, cubes that wait for each other, bank
//! conflicts, cache misses, and any time that is neither issuing nor loading.

use std::cmp::Reverse;
use std::collections::BTreeMap;

pub mod code;
pub mod launch;
pub mod paths;
pub mod pipes;
pub mod wait;

#[cfg(test)]
mod tests;

pub use code::MachineCode;
pub use pipes::Pipe;

/// The performance specification of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuSpec {
    /// The [architecture](crate::arch) that the machine code is compiled for.
    pub arch: &'static str,
    /// The number of multiprocessors.
    pub multiprocessors: f64,
    /// Clocks per second.
    pub clock: f64,
    /// Bytes per second for a copy of a large buffer. Bytes read and bytes written are both counted.
    pub copy: f64,
    /// Operations per second of all tensor cores, for dense 16-bit factors.
    pub tensor: f64,
    /// Seconds from a load to its value while memory is busy.
    pub latency: f64,
    /// The offset of the kernel parameters in the constant bank, in bytes.
    pub parameters: u32,
}

/// An H200 at the highest clock of its data sheet. At 1.755 GHz the bounds of work are 0.89 times these bounds. The
/// copy bandwidth was measured on an H200. The latency is an assumption: 0.7 to 0.8 us under full load.
pub const H200: GpuSpec = GpuSpec {
    arch: "sm_90a",
    multiprocessors: 132.0,
    clock: 1.98e9,
    copy: 4.3e12,
    tensor: 989.4e12,
    latency: 0.75e-6,
    parameters: 0x210,
};

/// An H100 SXM: an H200 with other memory. The copy bandwidth is an assumption: the same fraction of 3.35 TB/s that
/// was measured of the H200's 4.8 TB/s.
pub const H100: GpuSpec = GpuSpec {
    copy: 3.0e12,
    ..H200
};

/// The resources of a cube, which determine occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchShape {
    /// Units per cube.
    pub units: u32,
    /// Registers per unit.
    pub registers: u32,
    /// Bytes of shared memory per cube.
    pub shared: usize,
}

impl LaunchShape {
    /// Returns the number of planes (CUDA: warps) that are resident on a multiprocessor of compute capability 9.0.
    pub fn planes(&self) -> u32 {
        // A plane gets registers in multiples of 256, from a quarter of the register file. A cube costs 1 KiB of
        // shared memory in addition to its own shared memory.
        let of_plane = (self.registers.max(1) * 32).next_multiple_of(256);
        let of_cube = self.units.div_ceil(32).max(1);
        let by_registers = 4 * (16 * 1024 / of_plane) / of_cube;
        let by_shared = (228 * 1024 / (self.shared + 1024)) as u32;
        let by_planes = 64 / of_cube;
        by_registers.min(by_shared).min(by_planes).min(32) * of_cube
    }
}

/// Upper bounds as fractions of the copy bandwidth. A value above 1 is no limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// The bound from the instructions.
    pub work: f64,
    /// The pipe that limits the work.
    pub pipe: Pipe,
    /// The bound from waiting, or infinity if the kernel waits for nothing.
    pub wait: f64,
    /// The number of planes that are resident on a multiprocessor at the same time.
    pub planes: u32,
    /// The number of memory latencies that a unit waits for in sequence.
    pub waits: f64,
    /// The number of bytes that a unit moves during this time.
    pub bytes: f64,
    /// The instructions that bound the work, by their indices in the code.
    pub path: Vec<usize>,
}

impl Bound {
    /// Returns the lower of the two bounds.
    pub fn share(&self) -> f64 {
        self.work.min(self.wait)
    }
}

/// Returns the bound of a kernel, or `None` if no path of the kernel accesses memory. `cached` contains the indices
/// of the parameters that point to cached data. Cached data counts neither as traffic nor as waiting.
pub fn bound(
    code: &MachineCode,
    launch: LaunchShape,
    cached: &[u32],
    machine: &GpuSpec,
) -> Option<Bound> {
    let planes = launch.planes();
    let traffic = code.traffic(cached, machine.parameters);
    let each = regions(code).into_iter().filter_map(|region| {
        let of_path = |pipe: Pipe| {
            let path = paths::main_path(code, region, |i| pipe.quarters(&i.name))?;
            Some((bytes(&path, &traffic), path))
        };
        let per_clock = machine.copy / machine.multiprocessors / machine.clock;
        let work = Pipe::ALL.into_iter().filter_map(|pipe| {
            let (bytes, path) = of_path(pipe)?;
            let name = |at: &usize| pipe.quarters(&code.instructions[*at].name);
            let clocks = path.iter().map(name).sum::<u64>() as f64 / 4.0;
            Some((32.0 * bytes / clocks / per_clock, pipe, path))
        });
        let (work, pipe, slowest) = work.min_by(|a, b| a.0.total_cmp(&b.0))?;
        let (bytes, path) = of_path(Pipe::Issue)?;
        let waits = wait::latencies(code, &path, &traffic, region.is_loop);
        let per_second = f64::from(planes) * 32.0 * bytes / (waits * machine.latency);
        let wait = per_second * machine.multiprocessors / machine.copy;
        (bytes > 0.0).then_some(Bound {
            work,
            pipe,
            wait,
            planes,
            waits,
            bytes,
            path: slowest,
        })
    });
    each.reduce(|a, b| {
        let waiting = if a.wait <= b.wait { &a } else { &b };
        let slower = if a.work <= b.work { &a } else { &b };
        Bound {
            wait: waiting.wait,
            waits: waiting.waits,
            bytes: waiting.bytes,
            ..slower.clone()
        }
    })
}

/// Describes the path that bounds the work of a kernel. The text lists the number of instructions by name, and each
/// instruction with its pipe time in quarters of a clock and its bytes.
pub fn explain(code: &MachineCode, bound: &Bound, cached: &[u32], machine: &GpuSpec) -> String {
    let traffic = code.traffic(cached, machine.parameters);
    let path = bound.path.iter().map(|at| &code.instructions[*at]);
    let mut counts = BTreeMap::new();
    path.for_each(|i| *counts.entry(&i.name).or_insert(0) += 1);
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| Reverse(*count));
    let mut text = format!(
        "work {:.2} ({}): {} instructions\n\
         wait {:.2}: {} planes whose units move {} bytes in {} latencies\n\n",
        bound.work,
        bound.pipe.name(),
        bound.path.len(),
        bound.wait,
        bound.planes,
        bound.bytes,
        bound.waits
    );
    for (name, count) in counts {
        text += &format!("{count:5} {:3} {name}\n", bound.pipe.quarters(name));
    }
    text.push('\n');
    for at in &bound.path {
        let (instruction, bytes) = (&code.instructions[*at], traffic[*at].bytes);
        let quarters = bound.pipe.quarters(&instruction.name);
        text += &format!("{quarters:3} {bytes:2} {instruction}\n");
    }
    text
}

/// Returns the number of bytes that a unit moves on a path.
fn bytes(path: &[usize], traffic: &[code::MemoryTraffic]) -> f64 {
    let of_path = path.iter().map(|at| traffic[*at].bytes);
    of_path.sum::<u64>() as f64
}

/// Returns the loops that stream, or the whole kernel if no loop streams.
fn regions(code: &MachineCode) -> Vec<paths::Region> {
    let loops = paths::streaming_loops(code);
    if loops.is_empty() {
        vec![paths::Region {
            first: 0,
            last: code.instructions.len().saturating_sub(1),
            is_loop: false,
        }]
    } else {
        loops
    }
}
