//! The table of a step: the work of each kernel per layer and outside of layers, and the minimum time.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use burn_megatron_kernel_check::bound::launch::{Limit, least_seconds};
use burn_megatron_kernel_check::bound::{GpuSpec, H100, H200};

use super::counts::Launch;
use super::{ROW, ROWS, StepCase, StepCounts, StepRuns};

/// The sum of several launches.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaunchSum {
    /// The number of launches.
    pub launches: f64,
    /// Bytes moved from and to memory.
    pub bytes: f64,
    /// The bytes that grow with the tokens, in passes over `[tokens, hidden]` with 16 bits.
    pub passes: f64,
    /// The minimum time on an H100, in seconds.
    pub seconds: f64,
}

/// The launches of a kernel in a step, or all products.
#[derive(Clone, Debug)]
pub struct KernelRow {
    /// The name of the kernel.
    pub kernel: String,
    /// The launches per layer.
    pub layer: LaunchSum,
    /// The launches outside of layers.
    pub rest: LaunchSum,
    /// The minimum number of cubes of a launch.
    pub cubes: f64,
    /// The maximum number of instructions of a warp.
    pub longest: f64,
    /// The ratio of the bytes that instructions access to the bytes that memory moves.
    pub accessed: f64,
    /// The fraction of tensor core instructions.
    pub matrix: f64,
    /// The resource that limits the longest launch.
    pub limit: &'static str,
}

/// A step of [`ROWS`] rows.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The model.
    pub case: StepCase,
    /// The step with two layers.
    pub two_layers: StepCounts,
    /// The step with two layers, with one row and with two rows.
    pub counted: [StepCounts; 2],
    /// The rows by kernel, longest time first. Products are last.
    pub rows: Vec<KernelRow>,
    /// The minimum time on an H200, in seconds.
    pub h200_seconds: f64,
}

/// The name of the row of products.
pub const PRODUCTS: &str = "cuBLASLt";

/// Sums and extremes of the launches of a kernel in a step.
#[derive(Clone, Default)]
struct Group {
    sum: LaunchSum,
    cubes: f64,
    longest: f64,
    accessed: f64,
    instructions: f64,
    matrix: f64,
    slowest: f64,
    limit: &'static str,
}

impl StepReport {
    /// Computes the report.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`StepCounts::align`].
    pub fn new(case: &StepCase, runs: &StepRuns) -> Result<Self, String> {
        let pass = (2 * ROW * case.config.hidden) as f64;
        let mut steps = vec![];
        for [one, two] in &runs.0 {
            let counted = [StepCounts::align(one, two)?, two.clone()];
            let many = StepCounts::at_rows(&counted[0], two, ROWS);
            steps.push((groups(&counted, &many, pass, &H100), many, counted));
        }
        let (two, many, counted) = steps.pop().ok_or("no step of two layers")?;
        let (one, fewer, _) = steps.pop().ok_or("no step of one layer")?;
        let seconds = |step: &StepCounts| seconds(step, &H200);
        let layer = seconds(&many) - seconds(&fewer);
        let h200_seconds = seconds(&fewer) + layer * (case.layers as f64 - 1.0);
        let mut rows: Vec<_> = two
            .into_iter()
            .map(|(kernel, two)| row(&kernel, one.get(&kernel), two))
            .collect();
        let seconds = |row: &KernelRow| row.seconds(case.layers);
        rows.sort_by(|a, b| {
            let products = |row: &KernelRow| row.kernel == PRODUCTS;
            let longer = seconds(b).total_cmp(&seconds(a));
            products(a).cmp(&products(b)).then(longer)
        });
        Ok(Self {
            case: case.clone(),
            two_layers: many,
            counted,
            rows,
            h200_seconds,
        })
    }

    /// Returns the sum of all kernels in a layer, without products.
    pub fn layer(&self) -> LaunchSum {
        let kernels = self.rows.iter().filter(|row| row.kernel != PRODUCTS);
        kernels.fold(LaunchSum::default(), |sum, row| sum.plus(&row.layer, 1.0))
    }

    /// Returns the minimum time of the step on an H100, in seconds.
    pub fn seconds(&self) -> f64 {
        self.rows
            .iter()
            .map(|row| row.seconds(self.case.layers))
            .sum()
    }
}

impl KernelRow {
    fn seconds(&self, layers: usize) -> f64 {
        self.layer.seconds * layers as f64 + self.rest.seconds
    }
}

impl LaunchSum {
    /// Returns the sum of this and `factor` times `other`.
    fn plus(&self, other: &Self, factor: f64) -> Self {
        Self {
            launches: self.launches + factor * other.launches,
            bytes: self.bytes + factor * other.bytes,
            passes: self.passes + factor * other.passes,
            seconds: self.seconds + factor * other.seconds,
        }
    }
}

impl Group {
    fn add(&mut self, sum: LaunchSum, limit: &'static str) {
        self.sum = self.sum.plus(&sum, 1.0);
        if sum.seconds >= self.slowest {
            self.slowest = sum.seconds;
            self.limit = limit;
        }
    }

    fn add_launch(&mut self, launch: &Launch) {
        let cubes = launch.counts.cubes;
        self.cubes = if self.cubes > 0.0 {
            self.cubes.min(cubes)
        } else {
            cubes
        };
        self.longest = self.longest.max(launch.counts.longest_plane);
        self.accessed += launch.accessed;
        self.instructions += launch.instructions;
        self.matrix += launch.matrix;
    }
}

/// Groups the launches by kernel.
fn groups(
    [one, two]: &[StepCounts; 2],
    many: &StepCounts,
    pass: f64,
    machine: &GpuSpec,
) -> BTreeMap<String, Group> {
    let mut groups = BTreeMap::<String, Group>::new();
    let both = one.launches.iter().zip(&two.launches);
    for (launch, (one, two)) in many.launches.iter().zip(both) {
        let (seconds, limit) = least_seconds(&launch.counts, machine);
        let group = groups.entry(launch.kernel.clone()).or_default();
        group.add_launch(launch);
        let sum = LaunchSum {
            launches: 1.0,
            bytes: launch.counts.bytes,
            passes: (two.counts.bytes - one.counts.bytes) / pass,
            seconds,
        };
        group.add(sum, limit.name());
    }
    for product in &many.products {
        let sum = LaunchSum {
            launches: 1.0,
            bytes: product.bytes,
            passes: 0.0,
            seconds: product.least_seconds(machine),
        };
        let group = groups.entry(PRODUCTS.into()).or_default();
        group.add(sum, Limit::Tensor.name());
    }
    groups
}

fn seconds(step: &StepCounts, machine: &GpuSpec) -> f64 {
    let launches = step.launches.iter();
    let launches = launches.map(|launch| least_seconds(&launch.counts, machine).0);
    let products = step.products.iter();
    let products = products.map(|product| product.least_seconds(machine));
    launches.chain(products).sum()
}

/// Returns the row of a kernel. The launches per layer are the difference between two layers and one layer.
fn row(kernel: &str, one: Option<&Group>, two: Group) -> KernelRow {
    let one = one.map(|group| group.sum).unwrap_or_default();
    let layer = two.sum.plus(&one, -1.0);
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    KernelRow {
        kernel: kernel.into(),
        layer,
        rest: one.plus(&layer, -1.0),
        cubes: two.cubes,
        longest: two.longest,
        accessed: ratio(two.accessed, two.sum.bytes),
        matrix: ratio(two.matrix, two.instructions),
        limit: two.limit,
    }
}

impl Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layers, tokens) = (self.case.layers, ROWS * ROW as f64);
        writeln!(
            f,
            "{}, {layers} layers, {tokens} tokens, on an H100:\n",
            self.case.name
        )?;
        writeln!(
            f,
            "| kernel | launches: layer, rest | cubes | longest warp | GB: layer, rest | accessed | \
             matrix | ms: all layers, rest | limit |\n|---|---|---|---|---|---|---|---|---|"
        )?;
        for row in &self.rows {
            let KernelRow { layer, rest, .. } = row;
            writeln!(
                f,
                "| {} | {:.0}, {:.0} | {:.0} | {:.0} | {:.2}, {:.2} | {:.1} | {:.0} % | {:.2}, {:.2} | {} |",
                row.kernel,
                layer.launches,
                rest.launches,
                row.cubes,
                row.longest,
                layer.bytes / 1e9,
                rest.bytes / 1e9,
                row.accessed,
                100.0 * row.matrix,
                1e3 * layer.seconds * layers as f64,
                1e3 * rest.seconds,
                row.limit,
            )?;
        }
        let layer = self.layer();
        writeln!(
            f,
            "\nA layer launches {:.0} kernels, which make {:.1} passes over [tokens, hidden] of 16 bits.",
            layer.launches, layer.passes
        )?;
        let [one, _] = &self.counted;
        writeln!(
            f,
            "A step copies {} times to the host and {} times to the device, and waits by {:?}.",
            one.to_host, one.to_device, one.waits
        )?;
        for (name, seconds) in [("H100", self.seconds()), ("H200", self.h200_seconds)] {
            let speed = tokens / seconds / 1e3;
            writeln!(
                f,
                "No faster than {:.0} ms on an {name}, {speed:.0}k tokens/s.",
                1e3 * seconds
            )?;
        }
        Ok(())
    }
}
