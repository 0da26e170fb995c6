//! Selects few combinations of settings in which every pair of values occurs.

/// The name and the values of each setting.
pub type Settings<const N: usize> = [(&'static str, &'static [&'static str]); N];

/// The index of the selected value of each setting.
pub type Row<const N: usize> = [usize; N];

/// Returns the name of the value of a setting in a row.
///
/// # Panics
///
/// Panics if the setting does not exist.
pub fn value<const N: usize>(settings: &Settings<N>, row: &Row<N>, setting: &str) -> &'static str {
    let index = settings.iter().position(|(name, _)| *name == setting);
    let index = index.unwrap_or_else(|| panic!("no setting {setting}"));
    settings[index].1[row[index]]
}

/// Returns a row as text, for messages.
pub fn describe<const N: usize>(settings: &Settings<N>, row: &Row<N>) -> String {
    let names = settings.iter().zip(row);
    let names = names.map(|((name, values), value)| format!("{name} {}", values[*value]));
    names.collect::<Vec<_>>().join(", ")
}

/// Returns all valid rows.
pub fn product<const N: usize>(
    settings: &Settings<N>,
    is_valid: impl Fn(&Row<N>) -> bool,
) -> Vec<Row<N>> {
    let mut rows = vec![[0; N]];
    for (setting, (_, values)) in settings.iter().enumerate() {
        let with = |row: &Row<N>, value| {
            let mut row = *row;
            row[setting] = value;
            row
        };
        let all = rows
            .iter()
            .flat_map(|row| (0..values.len()).map(move |value| with(row, value)));
        rows = all.collect();
    }
    rows.retain(is_valid);
    rows
}

/// Returns the values of a row, numbered across all settings.
fn numbers<const N: usize>(settings: &Settings<N>, row: &Row<N>) -> Row<N> {
    let (mut numbers, mut before) = (*row, 0);
    for (number, (_, values)) in numbers.iter_mut().zip(settings) {
        *number += before;
        before += values.len();
    }
    numbers
}

fn pairs<const N: usize>(numbers: Row<N>) -> impl Iterator<Item = [usize; 2]> {
    (1..N).flat_map(move |second| (0..second).map(move |first| [numbers[first], numbers[second]]))
}

/// Returns rows of `all` that contain every pair of values that occurs in `all`. Each step selects the row with the
/// most missing pairs. To save time, a step examines only every `STRIDE`th row.
pub fn pairwise<const N: usize>(settings: &Settings<N>, all: &[Row<N>]) -> Vec<Row<N>> {
    const STRIDE: usize = 61;
    let values: usize = settings.iter().map(|(_, values)| values.len()).sum();
    let mut missing = vec![false; values * values];
    let index = |[first, second]: [usize; 2]| first * values + second;
    for row in all {
        pairs(numbers(settings, row)).for_each(|pair| missing[index(pair)] = true);
    }
    let (mut chosen, mut offset) = (vec![], 0);
    while missing.contains(&true) {
        let gain = |row: &&Row<N>| {
            let pairs = pairs(numbers(settings, row));
            pairs.filter(|pair| missing[index(*pair)]).count()
        };
        let some = all.iter().skip(offset % STRIDE).step_by(STRIDE);
        offset += 1;
        let Some(best) = some.max_by_key(gain).filter(|row| gain(row) > 0) else {
            continue;
        };
        pairs(numbers(settings, best)).for_each(|pair| missing[index(pair)] = false);
        chosen.push(*best);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_a_valid_row_is_in_a_chosen_one() {
        let settings: Settings<4> = [
            ("a", &["1", "2", "3"]),
            ("b", &["1", "2"]),
            ("c", &["1", "2"]),
            ("d", &["1", "2", "3"]),
        ];
        let all = product(&settings, |row| row[0] != row[3]);
        assert_eq!(all.len(), 24);
        let chosen = pairwise(&settings, &all);
        assert!(chosen.len() < all.len());
        for row in &all {
            for pair in pairs(numbers(&settings, row)) {
                let has = |chosen| pairs(numbers(&settings, chosen)).any(|own| own == pair);
                assert!(chosen.iter().any(has));
            }
        }
        assert_eq!(value(&settings, &[0, 1, 0, 2], "d"), "3");
        assert_eq!(describe(&settings, &[0, 1, 0, 2]), "a 1, b 2, c 1, d 3");
    }
}
