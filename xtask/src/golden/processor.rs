//! Names the environment that the bits of a result depend on: the processor, its caches and the C library.

use std::fs;
use std::path::Path;

/// Returns the name, such as `GenuineIntel-6-207-2-48K-2048K-266240K-glibc2.36`.
///
/// Matrix products use the instructions of the processor, and their block sizes depend on its caches. Exponentials
/// come from the C library.
pub fn name() -> Result<String, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|e| format!("{path}: {e}"));
    let model = model(&read("/proc/cpuinfo")?)?;
    let caches = caches(Path::new("/sys/devices/system/cpu/cpu0/cache"));
    Ok(format!("{model}{caches}-{}", c_library()))
}

/// Returns the vendor, family, model and stepping of the first processor in the text of `/proc/cpuinfo`.
fn model(cpuinfo: &str) -> Result<String, String> {
    let value = |key: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(name, _)| name.trim() == key);
        found
            .map(|(_, value)| value.trim())
            .ok_or_else(|| format!("/proc/cpuinfo has no {key}"))
    };
    let parts = ["vendor_id", "cpu family", "model", "stepping"].map(value);
    let parts: Vec<_> = parts.into_iter().collect::<Result<_, _>>()?;
    Ok(parts.join("-"))
}

/// Returns the sizes of the data caches, ordered by index. The text is empty if the system does not report caches.
fn caches(folder: &Path) -> String {
    let read = |index: usize, file: &str| {
        let text = fs::read_to_string(folder.join(format!("index{index}/{file}"))).ok()?;
        Some(text.trim().to_owned())
    };
    let data = (0..8).filter(|&index| read(index, "type").is_some_and(|it| it != "Instruction"));
    data.filter_map(|index| read(index, "size"))
        .map(|size| format!("-{size}"))
        .collect()
}

#[cfg(target_env = "gnu")]
fn c_library() -> String {
    // SAFETY: the function returns a static string that ends with a zero byte.
    let version = unsafe { std::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    format!("glibc{}", version.to_string_lossy())
}

#[cfg(not(target_env = "gnu"))]
fn c_library() -> String {
    std::env::consts::OS.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_the_first_processor_counts() {
        let text = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\n\
                    model name\t: Intel\nstepping\t: 2\n\nprocessor\t: 1\nmodel\t\t: 9\n";
        assert_eq!(model(text).unwrap(), "GenuineIntel-6-207-2");
        let error = model("vendor_id: A\n").unwrap_err();
        assert!(error.contains("cpu family"), "{error}");
    }
}
