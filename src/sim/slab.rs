//! A slab: values by index, with reuse of freed indices, newest first.

/// Values by index. A handle holds the generation of its index, so that a stale handle is recognised.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab {
            places: Vec::new(),
            free: Vec::new(),
        }
    }
}

/// Generations wrap here, so that a handle with a low mark still looks like a user-space address.
const GENERATIONS: u32 = 1 << 11;

impl<T> Slab<T> {
    /// Puts a value away; constant time.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            self.places[index as usize].value = Some(value);
            return index;
        }
        self.places.push(Place {
            generation: 0,
            value: Some(value),
        });
        (self.places.len() - 1) as u32
    }

    /// Takes the value out; its handles are stale from then on.
    pub fn remove(&mut self, index: u32) -> Option<T> {
        let place = self.places.get_mut(index as usize)?;
        let value = place.value.take()?;
        place.generation = (place.generation + 1) % GENERATIONS;
        self.free.push(index);
        Some(value)
    }

    pub fn get(&self, index: u32) -> Option<&T> {
        self.places.get(index as usize)?.value.as_ref()
    }

    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.places.get_mut(index as usize)?.value.as_mut()
    }

    /// The handle of a place: never zero, a multiple of 16.
    pub fn handle(&self, index: u32) -> u64 {
        let generation = self
            .places
            .get(index as usize)
            .map_or(0, |place| place.generation);
        (u64::from(generation) << 32 | (u64::from(index) + 1)) << 4
    }

    /// The place a handle names, unless its value is gone.
    pub fn index(&self, handle: u64) -> Option<u32> {
        if handle & 15 != 0 {
            return None;
        }
        let index = ((handle >> 4) as u32).checked_sub(1)?;
        let place = self.places.get(index as usize)?;
        (place.value.is_some() && u64::from(place.generation) == handle >> 36).then_some(index)
    }

    /// All values with their indices; for the rare walks.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.places
            .iter()
            .enumerate()
            .filter_map(|(index, place)| Some((index as u32, place.value.as_ref()?)))
    }

    /// The same, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.places
            .iter_mut()
            .enumerate()
            .filter_map(|(index, place)| Some((index as u32, place.value.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_is_recognised_after_reuse() {
        let mut slab = Slab::default();
        let first = slab.insert('a');
        let handle = slab.handle(first);
        assert_eq!(slab.index(handle), Some(first));
        assert_eq!(slab.remove(first), Some('a'));
        assert_eq!(slab.index(handle), None);
        assert_eq!(slab.insert('b'), first);
        assert_eq!(slab.index(handle), None);
        assert_ne!(slab.handle(first), handle);
        assert_eq!(slab.remove(7), None);
        assert_eq!(slab.index(0), None);
    }
}
