//! Hardware constants of the planner: the compute throughput and the memory bandwidth of a device, and the links
//! between devices.
//!
//! A [`Hardware`] is read from a TOML file. The files of common devices are [built in](Hardware::named). The source of
//! each constant is a comment in `src/hardware/*.toml`.

mod measure;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use measure::{MeasureError, measure};

/// Hardware constants of a cluster of identical devices.
///
/// ```
/// use burn_megatron_plan::hardware::Hardware;
///
/// let mut hardware = Hardware::named("h100")?;
/// assert_eq!(hardware.peak_of("bf16")?, 989.4e12);
/// // A hardware file with less memory.
/// hardware.memory /= 2;
/// assert_eq!(Hardware::parse(&hardware.to_toml())?, hardware);
/// assert!(Hardware::named("P100").is_err());
/// # Ok::<(), burn_megatron_plan::hardware::HardwareError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// The name that reports show.
    pub name: String,
    /// The memory size of a device, in bytes.
    pub memory: u64,
    /// The number of CPU cores that the ranks share. It is set only if the ranks are threads of one machine and the
    /// number of ranks is at least the number of cores.
    ///
    /// If this field is set, the other constants apply to a rank while all other ranks compute. While other ranks wait,
    /// a rank also uses their share of the cores, up to one core. The cores also copy the messages, so communication
    /// does not overlap with computation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
    /// The memory bandwidth that memory-bound operations reach, in bytes per second.
    pub bandwidth: f64,
    /// The overhead per operation in seconds, for example the time to launch a kernel. It is added once in the forward
    /// and once in the backward. It is 0 if kernels are launched asynchronously and the device is always busy.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub operation: f64,
    /// The peak throughput of matrix multiplications in FLOP/s, keyed by the dtype of the operands: `f32`, `bf16`,
    /// `f16` or `fp8`. Model FLOPs utilization (MFU) is relative to this peak.
    pub peak: BTreeMap<String, f64>,
    /// The share of the peak throughput that matrix multiplications reach, as a list of pairs of size and share. The
    /// key is a dtype, or `default` for all dtypes that are not listed. See [`product_share`](Self::product_share).
    pub products: BTreeMap<String, Vec<(f64, f64)>>,
    /// The share of the peak throughput that attention reaches. It is relative to the 16-bit peak, or to the f32 peak
    /// if the model computes in f32.
    pub attention: AttentionShare,
    /// The host of a device, if optimizer state and activations can be
    /// [offloaded](burn_megatron::nn::ActivationOffload) to its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// The links between devices, from the fastest to the slowest.
    pub links: Vec<Link>,
}

/// Hardware constants of a host: the share of its memory and bandwidth that one device may use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// The host memory for one device, in bytes.
    pub memory: u64,
    /// The bandwidth between a device and the host in bytes per second, per direction, while both directions are in
    /// use.
    pub link: f64,
    /// The memory bandwidth of the CPU for one device, in bytes per second of reads plus writes.
    pub bandwidth: f64,
}

/// The share of the peak throughput that attention reaches, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionShare {
    /// The share in the forward.
    pub forward: f64,
    /// The share in the backward.
    pub backward: f64,
}

/// A link, such as NVLink or InfiniBand, which connects groups of consecutive devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The name that reports show.
    pub name: String,
    /// The number of devices in each group that the link connects, for example the devices of a node or a rack. Only
    /// the last link has `None`, which means that it connects all devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<usize>,
    /// The bandwidth at which a device sends, in bytes per second.
    pub bandwidth: f64,
    /// The latency of each step of a collective, in seconds.
    pub latency: f64,
}

/// An error for a hardware file that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HardwareError {
    /// There is no built-in device with this name.
    #[error("invalid device {0:?}: expected {names}, or a hardware file", names = Hardware::names().join(", "))]
    Unknown(String),
    /// The file does not have the format of a hardware file.
    #[error("{0}")]
    Format(String),
    /// The value of a constant is out of range.
    #[error("invalid {name} = {value}: expected {expected}")]
    Value {
        /// The name of the constant.
        name: String,
        /// The value of the constant.
        value: String,
        /// The allowed values.
        expected: &'static str,
    },
    /// The hardware file has no peak throughput for a dtype.
    #[error("{device} has no peak throughput for {dtype}: it has {known}")]
    NoPeak {
        /// The name of the device.
        device: String,
        /// The dtype.
        dtype: String,
        /// The dtypes for which the file has a peak throughput.
        known: String,
    },
}

/// The built-in files.
const BUILT_IN: [(&str, &str); 5] = [
    ("H100", include_str!("h100.toml")),
    ("H200", include_str!("h200.toml")),
    ("B200", include_str!("b200.toml")),
    ("A100", include_str!("a100.toml")),
    ("MI300X", include_str!("mi300x.toml")),
];

impl Hardware {
    /// Returns the names of the built-in devices.
    pub fn names() -> [&'static str; 5] {
        BUILT_IN.map(|(name, _)| name)
    }

    /// Returns the constants of a built-in device, such as `H100`. The name is case-insensitive.
    ///
    /// # Errors
    ///
    /// [`HardwareError::Unknown`], which lists the names of the built-in devices.
    pub fn named(name: &str) -> Result<Self, HardwareError> {
        let found = BUILT_IN
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name));
        let (_, text) = found.ok_or_else(|| HardwareError::Unknown(name.into()))?;
        Self::parse(text)
    }

    /// Parses the text of a hardware file (TOML).
    ///
    /// # Errors
    ///
    /// [`HardwareError`], which names the invalid constant.
    pub fn parse(text: &str) -> Result<Self, HardwareError> {
        let hardware: Self =
            toml::from_str(text).map_err(|error| HardwareError::Format(error.to_string()))?;
        hardware.check()?;
        Ok(hardware)
    }

    /// Returns the constants as the text of a hardware file (TOML).
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| error.to_string())
    }

    fn check(&self) -> Result<(), HardwareError> {
        let peaks = self.peak.iter();
        let peaks = peaks.map(|(dtype, value)| (format!("peak.{dtype}"), *value));
        let links = self.links.iter().enumerate();
        let links = links.flat_map(|(i, link)| {
            [
                (format!("links.{i}.bandwidth"), link.bandwidth),
                (format!("links.{i}.latency"), link.latency),
            ]
        });
        let own = [
            ("memory".into(), self.memory as f64),
            ("bandwidth".into(), self.bandwidth),
        ];
        let host = self.host.iter().flat_map(|host| {
            [
                ("host.memory".into(), host.memory as f64),
                ("host.link".into(), host.link),
                ("host.bandwidth".into(), host.bandwidth),
            ]
        });
        let cores = self.cores.map(|cores| ("cores".into(), cores as f64));
        let own = own.into_iter().chain(cores).chain(host);
        for (name, value) in own.chain(peaks).chain(links) {
            if !(value.is_finite() && value > 0.0) {
                return Err(invalid(name, value, "a finite number above 0"));
            }
        }
        if !(self.operation.is_finite() && self.operation >= 0.0) {
            let name = "operation".into();
            return Err(invalid(
                name,
                self.operation,
                "a finite number of at least 0",
            ));
        }
        self.check_shares()?;
        let mut inside = 1;
        for (i, link) in self.links.iter().enumerate() {
            let is_last = i + 1 == self.links.len();
            let devices = link.devices.unwrap_or(usize::MAX);
            if link.devices.is_none() != is_last {
                let name = format!("links.{i}.devices");
                let value = link.devices.map_or("none".into(), |n| n.to_string());
                return Err(invalid(name, value, "a number for each link but the last"));
            }
            if devices < 2 || devices <= inside || !is_last && !devices.is_multiple_of(inside) {
                let name = format!("links.{i}.devices");
                return Err(invalid(
                    name,
                    devices,
                    "at least 2, and a multiple of the link before",
                ));
            }
            inside = devices;
        }
        if self.links.is_empty() {
            return Err(invalid("links".into(), "none", "at least one"));
        }
        Ok(())
    }

    fn check_shares(&self) -> Result<(), HardwareError> {
        let attention = [
            ("attention.forward".into(), self.attention.forward),
            ("attention.backward".into(), self.attention.backward),
        ];
        let products = self.products.iter();
        let products = products.flat_map(|(dtype, curve)| {
            let shares = curve.iter();
            shares.map(move |(size, share)| (format!("products.{dtype} of size {size}"), *share))
        });
        for (name, share) in attention.into_iter().chain(products) {
            if !(share > 0.0 && share <= 1.0) {
                return Err(invalid(name, share, "a share above 0, at most 1"));
            }
        }
        if !self.products.contains_key("default") {
            return Err(invalid("products.default".into(), "none", "a list"));
        }
        for (dtype, curve) in &self.products {
            let sizes_rise = curve.windows(2).all(|pair| pair[0].0 < pair[1].0);
            if curve.is_empty() || !sizes_rise || curve[0].0 <= 0.0 {
                let name = format!("products.{dtype}");
                return Err(invalid(
                    name,
                    "its sizes",
                    "one or more, above 0 and rising",
                ));
            }
        }
        Ok(())
    }

    /// Returns the peak throughput of matrix multiplications with operands of type `dtype`, in FLOP/s.
    ///
    /// # Errors
    ///
    /// [`HardwareError::NoPeak`] if the hardware file has no peak for this dtype.
    pub fn peak_of(&self, dtype: &str) -> Result<f64, HardwareError> {
        let found = self.peak.get(dtype).copied();
        found.ok_or_else(|| HardwareError::NoPeak {
            device: self.name.clone(),
            dtype: dtype.into(),
            known: self.peak.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    /// Returns the share of the peak throughput that matrix multiplications of type `dtype` and size `size` reach. The
    /// size of a multiplication of `[m, k]` and `[k, n]` is the cube root of `m n k`.
    ///
    /// Between the sizes in [`products`](Self::products), the share is interpolated linearly in the logarithm of the
    /// size. Above the largest size, the share is constant. Below the smallest size, the share decreases so that a
    /// multiplication takes as long as a multiplication of the smallest size.
    pub fn product_share(&self, dtype: &str, size: f64) -> f64 {
        let curve = self.products.get(dtype);
        let curve = &curve.unwrap_or(&self.products["default"])[..];
        let above = curve.partition_point(|(known, _)| *known <= size);
        let Some(&(low, share)) = curve[..above].last() else {
            // A smaller multiplication takes as long as a multiplication of the smallest given size.
            let (least, share) = curve[0];
            return share * (size / least).powi(3).min(1.0);
        };
        match curve.get(above) {
            None => share,
            Some((high, next)) => share + (next - share) * (size / low).ln() / (high / low).ln(),
        }
    }
}

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

fn invalid(name: String, value: impl ToString, expected: &'static str) -> HardwareError {
    HardwareError::Value {
        name,
        value: value.to_string(),
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_files_are_valid_and_written_as_read() {
        for name in Hardware::names() {
            let hardware = Hardware::named(&name.to_lowercase()).unwrap();
            assert_eq!(hardware.name, name);
            assert_eq!(Hardware::parse(&hardware.to_toml()).unwrap(), hardware);
            let large = hardware.product_share("bf16", 1e6);
            assert!((0.35..0.7).contains(&large), "{name}: {large}");
        }
        let error = Hardware::named("H900").unwrap_err().to_string();
        let expected =
            "invalid device \"H900\": expected H100, H200, B200, A100, MI300X, or a hardware file";
        assert_eq!(error, expected);
    }

    #[test]
    fn the_share_is_between_those_of_the_nearest_sizes() {
        let h100 = Hardware::named("H100").unwrap();
        let share = |size| h100.product_share("bf16", size);
        assert_eq!(share(1024.0), 0.37);
        assert!((share(1024.0 * 2f64.sqrt()) - 0.43).abs() < 1e-12);
        assert_eq!(share(1e9), 0.555);
        // A multiplication of size 64 takes the same time as a multiplication of the smallest given size.
        assert_eq!(share(64.0), 0.02 / 8.0);
        assert!(h100.product_share("fp8", 4096.0) < share(4096.0));
    }

    #[test]
    fn a_wrong_constant_is_named() {
        let text = include_str!("h100.toml");
        for (from, to, says) in [
            (
                "bandwidth = 2.85e12",
                "bandwidth = -1.0",
                "invalid bandwidth = -1: expected a finite number above 0",
            ),
            (
                "devices = 8",
                "",
                "invalid links.0.devices = none: expected a number for each link but the last",
            ),
            (
                "devices = 8",
                "devices = 1",
                "invalid links.0.devices = 1: expected at least 2",
            ),
            (
                "forward = 0.50",
                "forward = 1.5",
                "invalid attention.forward = 1.5: expected a share above 0, at most 1",
            ),
            (
                "[4096, 0.54]",
                "[1024, 0.54]",
                "invalid products.default = its sizes",
            ),
            ("memory =", "size =", "unknown field `size`"),
            (
                "bandwidth = 2.85e12",
                "bandwidth = 2.85e12\noperation = -1.0",
                "invalid operation = -1: expected a finite number of at least 0",
            ),
            (
                "link = 53e9",
                "link = 0.0",
                "invalid host.link = 0: expected a finite number above 0",
            ),
        ] {
            let error = Hardware::parse(&text.replacen(from, to, 1));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let a100 = Hardware::named("A100").unwrap();
        let expected = "A100 has no peak throughput for fp8: it has bf16, f16, f32";
        assert_eq!(a100.peak_of("fp8").unwrap_err().to_string(), expected);
    }
}
