//! NCCL versions, and the first version that has each function, according to the release notes and the conditions in
//! `nccl.h`.

use std::ffi::c_int;
use std::fmt;

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Version {
    /// The first version with non-blocking communicators (`ncclCommInitRankConfig`, `ncclCommFinalize`). In older
    /// versions, a missing rank blocks the other ranks forever.
    pub const MIN: Self = Self::new(2, 14, 0);
    /// The first version with CTA limits per communicator (`minCTAs` and `maxCTAs` of `ncclConfig_t`).
    pub const CTAS: Self = Self::new(2, 17, 1);
    /// The first version that splits communicators (`ncclCommSplit`).
    pub const SPLIT: Self = Self::new(2, 18, 1);
    /// The first version that allocates and registers memory (`ncclMemAlloc`, `ncclCommRegister`).
    pub const REGISTER: Self = Self::new(2, 19, 1);
    /// The first version with 8-bit floats (`ncclFloat8e4m3`, `ncclFloat8e5m2`).
    pub const FP8: Self = Self::new(2, 24, 3);
    /// The first version with traffic classes (`trafficClass` of `ncclConfig_t`).
    #[cfg(test)]
    pub const TRAFFIC_CLASS: Self = Self::new(2, 25, 1);
    /// The first version in which one thread may have several non-blocking NCCL groups in progress. In older versions,
    /// the state of a group is stored per thread (`ncclGroupEndInternal`).
    pub const CONCURRENT_GROUPS: Self = Self::new(2, 27, 3);
    /// The first version with windows of symmetric memory (`ncclCommWindowRegister`).
    pub const WINDOWS: Self = Self::new(2, 27, 3);

    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self {
            major,
            minor,
            patch,
        }
    }

    /// Decodes the version number that `ncclGetVersion` returns. For example, 22703 means 2.27.3. Up to version 2.8 the
    /// numbers were shorter: 2708 means 2.7.8.
    pub fn from_code(code: c_int) -> Self {
        let code = code.unsigned_abs();
        match code {
            0..10_000 => Self::new(code / 1000, code / 100 % 10, code % 100),
            _ => Self::new(code / 10_000, code / 100 % 100, code % 100),
        }
    }

    /// Returns the number that `ncclGetVersion` returns for this version. The version must be 2.9 or newer.
    pub const fn code(self) -> u32 {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decoded() {
        for (code, text) in [
            (2708, "2.7.8"),
            (2804, "2.8.4"),
            (20908, "2.9.8"),
            (21400, "2.14.0"),
            (22703, "2.27.3"),
            (23203, "2.32.3"),
            (30001, "3.0.1"),
        ] {
            assert_eq!(Version::from_code(code).to_string(), text);
        }
        let version = Version::new(2, 27, 3);
        assert_eq!(Version::from_code(version.code() as c_int), version);
    }

    #[test]
    fn later_versions_are_greater() {
        let order = [
            Version::from_code(2708),
            Version::MIN,
            Version::SPLIT,
            Version::REGISTER,
            Version::FP8,
            Version::WINDOWS,
            Version::new(3, 0, 0),
        ];
        assert!(order.is_sorted_by(|a, b| a < b));
    }
}
