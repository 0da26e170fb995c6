//! Selection of an attention engine for a device, an element type, and the head sizes of a model.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device};

#[cfg(feature = "cubecl")]
use super::MmaTiles;
use super::compare::{EngineMismatch, SmallProblem};
use super::{AttentionEngine, Heads, Portable, Window};
use crate::unchecked::is_unchecked;

/// The attention engines that [`select_engine`] can select.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EngineKind {
    /// `MmaTiles`, which uses NVIDIA tensor cores with `mma.sync` in f16 and bf16.
    Mma,
    /// [`Portable`], which supports every type on every device.
    Portable,
}

impl EngineKind {
    /// All engines in the order of preference. The last engine supports every problem.
    pub const ALL: [Self; 2] = [Self::Mma, Self::Portable];

    /// Returns the name of the engine in recipes and command-line flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mma => "mma",
            Self::Portable => "portable",
        }
    }

    /// Creates the engine for a device.
    fn open(self, device: &Device) -> Result<Arc<dyn AttentionEngine>, String> {
        match self {
            Self::Mma if *device == Device::flex() => Err("a CPU has no tensor cores".into()),
            Self::Mma => open_mma(device),
            Self::Portable => Ok(Arc::new(Portable)),
        }
    }
}

#[cfg(feature = "cubecl")]
fn open_mma(device: &Device) -> Result<Arc<dyn AttentionEngine>, String> {
    Ok(Arc::new(MmaTiles::query(device)?))
}

#[cfg(not(feature = "cubecl"))]
fn open_mma(_device: &Device) -> Result<Arc<dyn AttentionEngine>, String> {
    Err("this build has no CubeCL device".into())
}

impl Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The result of [`select_engine`].
#[derive(Clone, Debug)]
pub struct SelectedEngine {
    /// The kind of the selected engine.
    pub kind: EngineKind,
    /// The selected engine.
    pub engine: Arc<dyn AttentionEngine>,
    /// Messages about the engines that have a higher preference but cannot be used. Each message contains the reason.
    pub skipped: Vec<String>,
}

/// Returns the first engine of `kinds` that can be used on `device` for attention in `dtype`. `heads`, `value_width`
/// and `window` describe the attention of the model.
///
/// Every engine except [`Portable`] is first [compared](super::compare_with_portable) with [`Portable`] on a small
/// attention problem. The comparison runs once per process for each combination of device, type, head sizes and window.
/// If the results differ, a warning is logged and the engine is not used.
///
/// # Errors
///
/// Returns an error if none of the engines can be used. The error contains a reason for each engine.
pub fn select_engine(
    kinds: &[EngineKind],
    device: &Device,
    dtype: DType,
    (heads, value_width): (Heads, usize),
    window: Option<Window>,
) -> Result<SelectedEngine, String> {
    let device = &device.clone().inner();
    let candidates = kinds.iter().map(|kind| (*kind, kind.open(device)));
    first_usable(candidates, |kind, engine| {
        let small = SmallProblem::new(device, dtype, (heads, value_width), window);
        let small = small.map_err(|error| error.to_string())?;
        engine.supports(&small.problem)?;
        let key = format!("{kind} {device:?} {dtype:?} {heads:?} {value_width} {window:?}");
        compare_once(key, || small.compare(&**engine)).map_err(|mismatch| mismatch.to_string())
    })
}

/// Returns the first engine that can be created and passes the comparison. [`Portable`] is the reference and is not
/// compared.
pub(super) fn first_usable(
    candidates: impl IntoIterator<Item = (EngineKind, Result<Arc<dyn AttentionEngine>, String>)>,
    check: impl Fn(EngineKind, &Arc<dyn AttentionEngine>) -> Result<(), String>,
) -> Result<SelectedEngine, String> {
    let mut skipped = vec![];
    for (kind, engine) in candidates {
        let checked = engine.and_then(|engine| {
            if kind != EngineKind::Portable {
                check(kind, &engine)?;
            }
            Ok(engine)
        });
        match checked {
            Ok(engine) => {
                return Ok(SelectedEngine {
                    kind,
                    engine,
                    skipped,
                });
            }
            Err(reason) => skipped.push(format!("{kind}: {reason}")),
        }
    }
    Err(skipped.join("; "))
}

/// Returns the result of the comparison with this key. The comparison runs only once per key. Logs a warning if the
/// comparison fails.
fn compare_once(
    key: String,
    compare: impl FnOnce() -> Result<(), EngineMismatch>,
) -> Result<(), EngineMismatch> {
    static COMPARED: Mutex<BTreeMap<String, Result<(), EngineMismatch>>> =
        Mutex::new(BTreeMap::new());
    // The lock is held during the comparison, so that the comparison runs once.
    let mut compared = COMPARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(result) = compared.get(&key) {
        return result.clone();
    }
    let result = match is_unchecked() {
        true => Ok(()),
        false => compare(),
    };
    if let Err(mismatch) = &result {
        tracing::warn!("the attention engine {key} is not used: {mismatch}");
    }
    compared.insert(key, result.clone());
    result
}
