//! Lower bounds of the time of a launch, from what an emulated GPU counts while it runs.
//!
//! The same machine and the same [pipes](super::pipes) as the bounds of machine code, with counts of a
//! whole launch in place of a path through its code. Counts are of PTX: of its instructions only
//! those are taken that every machine code has (floats, special functions, memory, exchange between
//! lanes, matrix units), none that a compiler folds into others (moves, addresses, branches).
//!
//! Time that is not in them: latencies (but for [`Limit::Plane`]), launching, waiting for the host,
//! the last wave of cubes, cache misses, copies within the registers. What stays in L2 from one
//! launch to the next need not come from memory, up to its 50 MB.

use super::{GpuSpec, Pipe};

/// Clocks from one instruction of a plane to the next that needs its result.
const DEPENDENT: f64 = 4.0;

/// Bytes per clock that a multiprocessor receives from L2 (the path is 64 bytes wide since Volta).
const MULTIPROCESSOR_BYTES: f64 = 64.0;

/// The counts of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaunchCounts {
    /// Cubes.
    pub cubes: f64,
    /// Instructions of planes that machine code keeps.
    pub issued: f64,
    /// Instructions on floats.
    pub floats: f64,
    /// Instructions of special functions.
    pub specials: f64,
    /// Operations of matrix units.
    pub matrix_flops: f64,
    /// Passes over the banks of shared memory.
    pub shared_wavefronts: f64,
    /// Instructions of the plane that runs the most.
    pub longest_plane: f64,
    /// Bytes that memory must move: of each sector that is touched, once.
    pub bytes: f64,
}

/// The resource that limits a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The bandwidth of a copy, or of the multiprocessors in use.
    Memory,
    /// A pipe of the multiprocessors in use; [`Pipe::Lsu`] by its accesses to shared memory.
    Pipe(Pipe),
    /// The matrix units of the multiprocessors in use, at the rate of 16-bit factors.
    Tensor,
    /// The longest plane, each of whose instructions waits for the one before. That is an estimate:
    /// with independent instructions it takes down to a quarter, with loads that miss the caches a
    /// hundred times as long.
    Plane,
}

impl Limit {
    /// As a table shows it.
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

/// The seconds that each limit leaves a launch; it takes at least as long as the longest.
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

/// The seconds that a launch takes at least, and what limits it.
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
    /// The sizes.
    pub sizes: [f64; 3],
    /// Bits of an element of the factors.
    pub bits: u32,
    /// Bytes of both factors and of the result, with what is added to it.
    pub bytes: f64,
}

impl ProductCounts {
    /// Additions and multiplications.
    pub fn flops(&self) -> f64 {
        2.0 * self.sizes.iter().product::<f64>()
    }

    /// The seconds that it takes at least: at the peak of the matrix units for factors of this width (32
    /// bits as TF32), and to move its bytes.
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

    /// Each limit alone, from the figures of the data sheets.
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

    /// On one multiprocessor all but the longest plane takes longer; a copy by its 64 bytes a clock.
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

    /// A scalar product of two rows of an H100: 67 TFLOP/s is the figure of its data sheet.
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
