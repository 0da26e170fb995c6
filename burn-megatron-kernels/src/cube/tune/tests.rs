use std::sync::{Arc, Mutex};

use burn_cubecl::ops::numeric::ones;
use cubecl::wgpu::WgpuDevice;

use super::*;

/// A kernel that records its launches: the trials of the tuner and the final launch.
#[derive(Clone)]
struct Counted {
    output: CubeTensor,
    is_trial: bool,
    trials: Arc<Mutex<Vec<Split>>>,
    launches: Arc<Mutex<Vec<Split>>>,
}

impl Counted {
    fn new(elements: usize) -> Self {
        let device = WgpuDevice::default().into();
        Self {
            output: ones(device, [elements].into(), DType::F32),
            is_trial: false,
            trials: Arc::default(),
            launches: Arc::default(),
        }
    }

    /// Returns the trials and the final launches of one call.
    fn call(&self) -> [Vec<Split>; 2] {
        launch_tuned(self.clone());
        [&self.trials, &self.launches].map(|splits| core::mem::take(&mut *splits.lock().unwrap()))
    }

    fn count(&self) -> [usize; 2] {
        self.call().map(|splits| splits.len())
    }
}

impl Elementwise for Counted {
    const STATIC: Split = Split::new(256, 1);

    fn operation(&self) -> Operation {
        Operation::Counted
    }

    fn vector(&self) -> usize {
        1
    }

    fn output(&self) -> &CubeTensor {
        &self.output
    }

    fn trial(&self) -> Self {
        Self {
            is_trial: true,
            ..self.clone()
        }
    }

    fn launch(self, split: Split) {
        let splits = if self.is_trial {
            &self.trials
        } else {
            &self.launches
        };
        splits.lock().unwrap().push(split);
        // This copy gives the launch a measurable device time.
        self.output.copy();
    }
}

/// The first call with a key tries every split. Each call, including the first call, launches the kernel once.
#[test]
fn only_the_first_call_of_a_kind_measures() {
    let kernel = Counted::new(MIN_TUNED_ELEMENTS);
    let [trials, chosen] = kernel.call();
    assert!(SPLITS.iter().all(|split| trials.contains(split)));
    assert_eq!(chosen.len(), 1);
    for _ in 0..3 {
        assert_eq!(kernel.call(), [vec![], chosen.clone()]);
    }
    // Two other sizes. One has a different key, and one has the key that was already measured.
    let other = Counted::new(MIN_TUNED_ELEMENTS + 1);
    assert!(other.count()[0] >= SPLITS.len());
    assert_eq!(Counted::new(2 * MIN_TUNED_ELEMENTS).count(), [0, 1]);
    assert_eq!(Counted::new(MIN_TUNED_ELEMENTS).call(), [vec![], chosen]);
}

#[test]
fn small_launches_are_not_measured() {
    for elements in [1, MIN_TUNED_ELEMENTS - 1] {
        let found = Counted::new(elements).call();
        assert_eq!(found, [vec![], vec![Counted::STATIC]]);
    }
}

#[test]
fn a_forced_split_is_taken_whatever_the_size() {
    for elements in [4, 4 * MIN_TUNED_ELEMENTS] {
        let kernel = Counted::new(elements);
        for split in SPLITS {
            let found = with_split(Some(split), || kernel.call());
            assert_eq!(found, [vec![], vec![split]]);
        }
    }
}

#[test]
fn candidates_fit_the_device_and_begin_with_the_kernels_own() {
    for (most, count) in [(256, 3), (512, 5), (1024, 5)] {
        let set = candidates::<Counted>(most);
        assert_eq!(set.len(), count, "up to {most} units");
        let kernel = Counted::new(4);
        assert_eq!(set.generate_key(&kernel), key(&kernel));
        assert!(set.generate_inputs(&key(&kernel), &kernel).is_trial);
    }
}

#[test]
fn kinds_differ_by_vector_type_and_rounded_size() {
    let of = |elements| key(&Counted::new(elements));
    assert_eq!(of(1000), of(1024));
    assert_ne!(of(1000), of(1025));
    let mut other = of(1024);
    other.vector = 4;
    assert_ne!(other, of(1024));
    let mut other = of(1024);
    other.dtype = DType::F16;
    assert_ne!(other, of(1024));
}
