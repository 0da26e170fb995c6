//! Reads the device operations of a step from the lines that the emulated GPU writes.

use std::collections::BTreeMap;

use burn_megatron_kernel_check::bound::launch::{LaunchCounts, ProductCounts};
use serde_json::Value;

/// The size of a sector in bytes. A sector is the unit of memory transfers.
const SECTOR: f64 = 32.0;

/// The emulator's names of the instruction kinds that machine code keeps.
const ISSUED: [&str; 7] = [
    "float", "special", "global", "shared", "atomic", "lanes", "matrix",
];

/// A launch of a kernel, or its extrapolation to another number of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The name of the kernel, without the hash that CubeCL appends.
    pub kernel: String,
    /// The counts that bound its time.
    pub counts: LaunchCounts,
    /// The number of warps.
    pub warps: f64,
    /// The number of instructions of all warps.
    pub instructions: f64,
    /// The number of tensor core instructions.
    pub matrix: f64,
    /// Bytes of the sectors that the instructions access, counted for each instruction separately.
    pub accessed: f64,
}

/// The device operations of a step, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepCounts {
    /// The launches of kernels.
    pub launches: Vec<Launch>,
    /// The products of cuBLASLt.
    pub products: Vec<ProductCounts>,
    /// The number of copies to the host.
    pub to_host: usize,
    /// The number of copies to the device.
    pub to_device: usize,
    /// The numbers of calls in which the host waits for the device, by name.
    pub waits: BTreeMap<String, usize>,
}

impl StepCounts {
    /// Reads lines of the emulator's file of counts.
    ///
    /// # Errors
    ///
    /// Returns an error for the first line that is not valid.
    pub fn parse(lines: &str) -> Result<Self, String> {
        let mut step = Self::default();
        for line in lines.lines() {
            let read = serde_json::from_str::<Value>(line).map_err(|error| error.to_string());
            read.and_then(|value| step.add(&value).ok_or_else(|| "unknown".into()))
                .map_err(|error| format!("invalid line of counts {line:?}: {error}"))?;
        }
        Ok(step)
    }

    fn add(&mut self, line: &Value) -> Option<()> {
        if line.get("kernel").is_some() {
            self.launches.push(launch(line)?);
        } else if line.get("product").is_some() {
            self.products.push(product(line)?);
        } else if let Some(way) = line.get("copy") {
            match way.as_str()? {
                "dtoh" => self.to_host += 1,
                "htod" => self.to_device += 1,
                "dtod" | "htoh" => {}
                _ => return None,
            }
        } else if let Some(call) = line.get("wait") {
            *self.waits.entry(call.as_str()?.into()).or_default() += 1;
        } else {
            line.get("fill")?;
        }
        Some(())
    }

    /// Returns the step `one` of one row, extended by the launches that only the step `two` of two rows has, such as
    /// a sum over rows. These launches get half of their counts in `two`.
    ///
    /// # Errors
    ///
    /// Returns an error if a launch of one row is not in order in the step of two rows, or if the numbers of products
    /// differ.
    pub fn align(one: &Self, two: &Self) -> Result<Self, String> {
        let mut left = one.launches.iter().peekable();
        let launches = two.launches.iter().map(|launch| {
            let same = left.next_if(|one| one.kernel == launch.kernel);
            same.cloned()
                .unwrap_or_else(|| launch.zip(launch, |all, _| all / 2.0))
        });
        let launches = launches.collect();
        if let Some(launch) = left.next() {
            let kernel = &launch.kernel;
            return Err(format!("a step of two rows lacks {kernel} of one row"));
        }
        let products = [one.products.len(), two.products.len()];
        if products[0] != products[1] {
            return Err(format!("products of one row and of two: {products:?}"));
        }
        Ok(Self {
            launches,
            ..one.clone()
        })
    }

    /// Extrapolates a step linearly to another number of rows. `one` and `two` are the steps of one and two rows,
    /// with the same launches.
    pub fn at_rows(one: &Self, two: &Self, rows: f64) -> Self {
        let launches = one.launches.iter().zip(&two.launches);
        let products = one.products.iter().zip(&two.products);
        let at_rows = |(one, two): (&Launch, &Launch)| one.zip(two, |a, b| line(a, b, rows));
        Self {
            launches: launches.map(at_rows).collect(),
            products: products.map(|(a, b)| product_at_rows(a, b, rows)).collect(),
            ..two.clone()
        }
    }
}

/// Extrapolates linearly from the numbers of one and two rows. The result is at least 0.
fn line(one: f64, two: f64, rows: f64) -> f64 {
    (one + (two - one) * (rows - 1.0)).max(0.0)
}

impl Launch {
    /// Returns a launch whose numbers are `make` of the numbers of both launches.
    fn zip(&self, other: &Self, make: impl Fn(f64, f64) -> f64) -> Self {
        let number = |of: fn(&Self) -> f64| make(of(self), of(other));
        Self {
            kernel: self.kernel.clone(),
            counts: LaunchCounts {
                cubes: number(|launch| launch.counts.cubes),
                issued: number(|launch| launch.counts.issued),
                floats: number(|launch| launch.counts.floats),
                specials: number(|launch| launch.counts.specials),
                matrix_flops: number(|launch| launch.counts.matrix_flops),
                shared_wavefronts: number(|launch| launch.counts.shared_wavefronts),
                longest_plane: number(|launch| launch.counts.longest_plane),
                bytes: number(|launch| launch.counts.bytes),
            },
            warps: number(|launch| launch.warps),
            instructions: number(|launch| launch.instructions),
            matrix: number(|launch| launch.matrix),
            accessed: number(|launch| launch.accessed),
        }
    }
}

fn product_at_rows(one: &ProductCounts, two: &ProductCounts, rows: f64) -> ProductCounts {
    let size = |at: usize| line(one.sizes[at], two.sizes[at], rows);
    ProductCounts {
        sizes: [0, 1, 2].map(size),
        bits: one.bits,
        bytes: line(one.bytes, two.bytes, rows),
    }
}

fn launch(line: &Value) -> Option<Launch> {
    let number = |name: &str| line[name].as_f64();
    let both = |name: &str| {
        let sectors = line[name]["read"].as_f64()? + line[name]["written"].as_f64()?;
        Some(SECTOR * sectors)
    };
    let instructions = line["instructions"].as_object()?;
    let of_kind = |kind: &str| instructions.get(kind).and_then(Value::as_f64);
    let of_kind = |kind: &str| of_kind(kind).unwrap_or_default();
    let grid = line["grid"].as_array()?.iter().map(Value::as_f64);
    Some(Launch {
        kernel: without_hash(line["kernel"].as_str()?).into(),
        counts: LaunchCounts {
            cubes: grid.product::<Option<f64>>()?,
            issued: ISSUED.into_iter().map(of_kind).sum(),
            floats: of_kind("float"),
            specials: of_kind("special"),
            matrix_flops: number("matrix_flops")?,
            shared_wavefronts: number("shared_wavefronts")?,
            longest_plane: number("longest_warp")?,
            bytes: both("touched_sectors")?,
        },
        warps: number("warps")?,
        instructions: instructions
            .values()
            .map(Value::as_f64)
            .sum::<Option<f64>>()?,
        matrix: of_kind("matrix"),
        accessed: both("global_sectors")?,
    })
}

/// Returns `name_0123abcd` as `name`.
fn without_hash(kernel: &str) -> &str {
    let is_hash = |text: &str| text.len() == 8 && text.chars().all(|c| c.is_ascii_hexdigit());
    match kernel.rsplit_once('_') {
        Some((name, hash)) if is_hash(hash) => name,
        _ => kernel,
    }
}

fn product(line: &Value) -> Option<ProductCounts> {
    let sizes = line["product"].as_array()?.iter().map(Value::as_f64);
    let [m, n, k] = sizes.collect::<Option<Vec<_>>>()?.try_into().ok()?;
    let bits = |at: usize| bits(line["types"][at].as_str()?);
    let [a, b, c, d] = [bits(0)?, bits(1)?, bits(2)?, bits(3)?].map(f64::from);
    let added = if line["beta"] == 0.0 { 0.0 } else { c };
    Some(ProductCounts {
        sizes: [m, n, k],
        bits: bits(0)?,
        bytes: (m * k * a + k * n * b + m * n * (added + d)) / 8.0,
    })
}

fn bits(name: &str) -> Option<u32> {
    match name {
        "f64" => Some(64),
        "f32" => Some(32),
        "f16" | "bf16" => Some(16),
        "e4m3" | "e5m2" => Some(8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"{"kernel":"norm_forward_0123abcd","grid":[2,3,1],"block":[64,1,1],"shared":0,"warps":12,"longest_warp":7,"instructions":{"float":5,"move":3,"matrix":2},"matrix_flops":8,"global_bytes":{"read":1,"written":1},"global_sectors":{"read":4,"written":5},"touched_sectors":{"read":1,"written":2},"bank_conflicts":0,"shared_wavefronts":6,"atomics":0}
{"product":[16,8,4],"types":["bf16","bf16","f32","f32"],"transposed":[true,false],"alpha":1.0,"beta":1.0,"bias":null,"scales":null}
{"copy":"dtoh","bytes":4}
{"copy":"htod","bytes":8}
{"fill":64}
{"wait":"cuEventSynchronize"}
{"wait":"cuEventSynchronize"}
"#;

    #[test]
    fn lines_are_read() {
        let step = StepCounts::parse(LINES).unwrap();
        let launch = &step.launches[0];
        assert_eq!(launch.kernel, "norm_forward");
        let expected = LaunchCounts {
            cubes: 6.0,
            issued: 7.0,
            floats: 5.0,
            specials: 0.0,
            matrix_flops: 8.0,
            shared_wavefronts: 6.0,
            longest_plane: 7.0,
            bytes: 96.0,
        };
        assert_eq!(launch.counts, expected);
        assert_eq!(
            [launch.warps, launch.instructions, launch.matrix],
            [12.0, 10.0, 2.0]
        );
        assert_eq!(launch.accessed, 9.0 * 32.0);
        let product = step.products[0];
        assert_eq!((product.flops(), product.bits), (1024.0, 16));
        assert_eq!(product.bytes, (16.0 * 4.0 + 4.0 * 8.0) * 2.0 + 128.0 * 8.0);
        assert_eq!((step.to_host, step.to_device), (1, 1));
        assert_eq!(step.waits["cuEventSynchronize"], 2);
        let error = StepCounts::parse("{\"copy\":\"dtoq\"}").unwrap_err();
        assert!(error.contains("dtoq"), "{error}");
        assert!(StepCounts::parse("{}").is_err());
    }

    #[test]
    fn numbers_lie_on_a_line() {
        let one = StepCounts::parse(LINES).unwrap();
        let mut two = one.clone();
        two.launches[0].counts.cubes = 8.0;
        two.launches[0].counts.bytes = 90.0;
        two.products[0].sizes[1] = 16.0;
        let many = StepCounts::at_rows(&one, &two, 64.0);
        let counts = many.launches[0].counts;
        assert_eq!(
            [counts.cubes, counts.bytes, counts.floats],
            [132.0, 0.0, 5.0]
        );
        assert_eq!(many.products[0].sizes, [16.0, 512.0, 4.0]);
        assert_eq!(StepCounts::at_rows(&one, &two, 2.0), two);
    }

    #[test]
    fn launches_of_two_rows_alone_count_half() {
        let one = StepCounts::parse(LINES).unwrap();
        assert_eq!(StepCounts::align(&one, &one), Ok(one.clone()));
        let mut two = one.clone();
        two.launches.insert(0, one.launches[0].clone());
        two.launches[0].kernel = "sum".into();
        let aligned = StepCounts::align(&one, &two).unwrap();
        assert_eq!(aligned.launches[0].kernel, "sum");
        assert_eq!(aligned.launches[0].counts.cubes, 3.0);
        assert_eq!(aligned.launches[1..], one.launches);
        let error = StepCounts::align(&two, &one).unwrap_err();
        assert!(error.contains("sum"), "{error}");
        two.products.clear();
        assert!(StepCounts::align(&one, &two).is_err());
    }
}
