//! Lower bounds of the time of a launch, from the counts that an emulated GPU writes.
//!
//! The GPU specification and the [pipes](super::pipes) are shared with the bounds from machine code. The counts cover
//! a whole launch instead of one path through the code. They count PTX instructions, but only instructions that all
//! machine code keeps: floats, special functions, memory, exchange between lanes, tensor cores. Instructions that a
//! compiler folds into others (moves, addresses, branches) are not counted.
//!
//! The bounds do not include latencies (except [`Limit::Plane`]), launching, waiting for the host, the last wave of
//! cubes, cache misses, and copies within the registers. Data that stays in L2 from one launch to the next (up to its
//! 50 MB) need not come from memory.

use super::{GpuSpec, Pipe};

/// Clocks from an instruction of a plane to the next instruction that needs its result.
const DEPENDENT: f64 = 4.0;

/// Bytes per clock that a multiprocessor receives from L2 (the path is 64 bytes wide since Volta).
const MULTIPROCESSOR_BYTES: f64 = 64.0;

/// The counts of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaunchCounts {
    /// The number of cubes.
    pub cubes: f64,
    /// Instructions of planes that the machine code keeps.
    pub issued: f64,
    /// Floating-point instructions.
    pub floats: f64,
    /// Instructions for special functions.
    pub specials: f64,
    /// Floating-point operations of the tensor cores.
    pub matrix_flops: f64,
    /// Passes over the banks of shared memory.
    pub shared_wavefronts: f64,
    /// Instructions of the plane that executes the most instructions.
    pub longest_plane: f64,
    /// Bytes that must be moved from or to memory. Each sector that is touched counts once.
    pub bytes: f64,
}

/// The resource that limits a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The bandwidth of a copy, or of the multiprocessors in use.
    Memory,
    /// A pipe of the multiprocessors in use. For [`Pipe::Lsu`], the accesses to shared memory count.
    Pipe(Pipe),
    /// The tensor cores of the multiprocessors in use, at their rate for 16-bit factors.
    Tensor,
    /// The longest plane, where each instruction waits for the previous one. This limit is an estimate. With
    /// independent instructions the plane takes down to a quarter of this time. With loads that miss the caches it
    /// takes up to a hundred times as long.
    Plane,
}

impl Limit {
    /// Returns the name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Memory => "memory",
            Limit::Pipe(Pipe::Lsu) => "shared",
            Limit::Pipe(pipe) => pipe.name(),
            Limit::Tensor => "tensor",
            Limit::Plane => "plane",
        }
    }
}

/// Returns the minimum time of a launch in seconds for each limit. The launch takes at least as long as the longest
/// time.
pub fn limits(counts: &LaunchCounts, machine: &GpuSpec) -> [(f64, Limit); 7] {
    let used = counts.cubes.clamp(1.0, machine.multiprocessors);
    let clocks = used * machine.clock;
    let busy = |pipe: Pipe, planes: f64, instruction: &str| {
        let quarters = planes * pipe.quarters(instruction) as f64;
        (quarters / 4.0 / clocks, Limit::Pipe(pipe))
    };
    let tensor = machine.tensor / machine.multiprocessors * used;
    let received = MULTIPROCESSOR_BYTES * clocks;
    [
        (counts.bytes / machine.copy.min(received), Limit::Memory),
        busy(Pipe::Issue, counts.issued, "FFMA"),
        busy(Pipe::Fma, counts.floats, "FFMA"),
        busy(Pipe::Xu, counts.specials, "MUFU"),
        busy(Pipe::Lsu, counts.shared_wavefronts, "LDS"),
        (counts.matrix_flops / tensor, Limit::Tensor),
        (
            counts.longest_plane * DEPENDENT / machine.clock,
            Limit::Plane,
        ),
    ]
}

/// Returns the minimum time of a launch in seconds, and the limit that sets it.
pub fn least_seconds(counts: &LaunchCounts, machine: &GpuSpec) -> (f64, Limit) {
    let none = (0.0, Limit::Memory);
    let all = limits(counts, machine).into_iter();
    all.fold(
        none,
        |most, limit| if limit.0 > most.0 { limit } else { most },
    )
}

/// A matrix product of a library: `m` x `n` sums over `k`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductCounts {
    /// The sizes `m`, `n` and `k`.
    pub sizes: [f64; 3],
    /// Bits of an element of the factors.
    pub bits: u32,
    /// Bytes of both factors, of the result, and of the values that are added to it.
    pub bytes: f64,
}

impl ProductCounts {
    /// Returns the number of additions and multiplications.
    pub fn flops(&self) -> f64 {
        2.0 * self.sizes.iter().product::<f64>()
    }

    /// Returns the minimum time in seconds: the larger of the compute time and the memory time. The compute time is
    /// at the peak rate of the tensor cores for factors of this width (32 bits as TF32).
    pub fn least_seconds(&self, machine: &GpuSpec) -> f64 {
        let peak = machine.tensor * 16.0 / f64::from(self.bits);
        (self.flops() / peak).max(self.bytes / machine.copy)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{H100, H200};
    use super::*;

    fn least(counts: LaunchCounts) -> (f64, Limit) {
        least_seconds(&counts, &H200)
    }

    #[track_caller]
    fn assert_near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-12, "{found} {expected}");
    }

    /// Tests each limit separately, with the figures of the data sheets.
    #[test]
    fn each_resource_limits() {
        let full = LaunchCounts {
            cubes: 1e4,
            ..LaunchCounts::default()
        };
        let planes_per_second = 132.0 * 1.98e9;
        for (counts, seconds, limit) in [
            (
                LaunchCounts {
                    bytes: 4.3e9,
                    ..full
                },
                1e-3,
                Limit::Memory,
            ),
            (
                LaunchCounts {
                    floats: 4e6,
                    ..full
                },
                1e6 / planes_per_second,
                Limit::Pipe(Pipe::Fma),
            ),
            (
                LaunchCounts {
                    issued: 4e6,
                    ..full
                },
                1e6 / planes_per_second,
                Limit::Pipe(Pipe::Issue),
            ),
            (
                LaunchCounts {
                    specials: 1e6,
                    ..full
                },
                2e6 / planes_per_second,
                Limit::Pipe(Pipe::Xu),
            ),
            (
                LaunchCounts {
                    shared_wavefronts: 1e6,
                    ..full
                },
                1e6 / planes_per_second,
                Limit::Pipe(Pipe::Lsu),
            ),
            (
                LaunchCounts {
                    matrix_flops: 989.4e9,
                    ..full
                },
                1e-3,
                Limit::Tensor,
            ),
            (
                LaunchCounts {
                    longest_plane: 1e6,
                    ..full
                },
                4e6 / 1.98e9,
                Limit::Plane,
            ),
        ] {
            let (found, by) = least(counts);
            assert_near(found, seconds);
            assert_eq!(by, limit);
        }
        assert_eq!(least(full).0, 0.0);
    }

    /// On a single multiprocessor, every limit except the longest plane takes more time. A copy is limited to 64
    /// bytes per clock.
    #[test]
    fn idle_multiprocessors_do_not_help() {
        let few = LaunchCounts {
            cubes: 1.0,
            floats: 4e6,
            ..LaunchCounts::default()
        };
        assert_near(least(few).0, 1e6 / 1.98e9);
        let bytes = LaunchCounts {
            cubes: 1.0,
            bytes: 64e6,
            ..LaunchCounts::default()
        };
        assert_near(least(bytes).0, 1e6 / 1.98e9);
        let plane = |cubes| LaunchCounts {
            cubes,
            longest_plane: 100.0,
            ..LaunchCounts::default()
        };
        assert_eq!(least(plane(1.0)), least(plane(500.0)));
    }

    /// A scalar product of two rows on an H100. The data sheet states 67 TFLOP/s.
    #[test]
    fn the_peak_of_scalar_units_is_that_of_the_data_sheet() {
        let counts = LaunchCounts {
            cubes: 1e4,
            floats: 67e12 / 64.0,
            ..LaunchCounts::default()
        };
        let (seconds, _) = least_seconds(&counts, &H100);
        assert!((seconds - 1.0).abs() < 0.01, "{seconds}");
    }

    #[test]
    fn products_take_the_peak_or_their_bytes() {
        let product = |bits, bytes| ProductCounts {
            sizes: [1e3, 2e3, 3e3],
            bits,
            bytes,
        };
        let seconds = |bits, bytes| product(bits, bytes).least_seconds(&H100);
        assert_near(product(16, 0.0).flops(), 12e9);
        assert_near(seconds(16, 0.0), 12e9 / 989.4e12);
        assert_near(seconds(8, 0.0), 12e9 / 1978.8e12);
        assert_near(seconds(32, 0.0), 12e9 / 494.7e12);
        assert_near(seconds(16, H100.copy), 1.0);
    }
}
